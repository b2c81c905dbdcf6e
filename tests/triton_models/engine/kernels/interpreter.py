"""Triton's interpreter without what it does again for each operation: the numbers are computed as ever.

Most of a kernel's time in the interpreter goes with the types of its tensors, which are made anew for each
operation, as are all their shapes; the same few come again and again.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core: Any = tl.core


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Leave out what takes most of a kernel's time and changes no number."""
    _prepare_once(patch)
    _ignore_overflows(patch)
    _keep_shapes(patch)
    _keep_types(patch)


def _prepare_once(patch: pytest.MonkeyPatch) -> None:
    """Put the operations in the language's place once, not in every function that a kernel calls."""

    def put(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        checked = member.__code__.co_qualname == "builtin.<locals>.wrapper"  # that it is called in a kernel
        compute = member.__wrapped__ if checked else member

        def computed(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return compute(*arguments, **options)

        scope.set_attr(obj, name, computed)

    prepare: Any = interpreter._patch_lang
    patch.setattr(interpreter, "_patch_attr", put)
    prepare(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patch.setattr(interpreter, "_patch_lang", lambda _function: interpreter._LangPatchScope())


def _ignore_overflows(patch: pytest.MonkeyPatch) -> None:
    """Compute no integers again in 64 bits to tell of an overflow: that is told only if `debug` is set."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _keep_shapes(patch: pytest.MonkeyPatch) -> None:
    make_block: Any = core.block_type.__init__
    make_tensor: Any = core.tensor.__init__
    broadcast: Any = TritonSemantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    scalar: dict[str, Any] = {"shape": core.tuple([]), "numel": core.constexpr(1)}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(each.value if isinstance(each, core.constexpr) else each for each in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            example = object.__new__(core.tensor)
            make_tensor(example, None, self)
            of_tensors = {"shape": example.shape, "numel": example.numel}
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            blocks[key]["of_tensors"] = of_tensors
        self.element_ty = element_ty
        self.__dict__.update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - it is called so
        self.__dict__.update(type.of_tensors if type.is_block() else scalar)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.shape is rhs.shape and lhs.type.is_block() == rhs.type.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    patch.setattr(core.block_type, "__init__", init_block)
    patch.setattr(core.tensor, "__init__", init_tensor)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_what_differs)


def _keep_types(patch: pytest.MonkeyPatch) -> None:
    """Look each kind of number up once."""
    look_up: Any = interpreter._get_np_dtype
    equal: Any = core.dtype.__eq__
    unwrap: Any = core._unwrap_if_constexpr
    promote: Any = TritonSemantic.computation_type_impl
    numpys: dict[str, Any] = {}
    promoted: dict[Any, Any] = {}
    plain = {core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool, str}

    def look_up_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpys:
            numpys[name] = look_up(kind)
        return numpys[name]

    def equal_if_same(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    def unwrap_what_is_wrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def promote_once(self: Any, *arguments: Any) -> Any:
        if arguments not in promoted:
            promoted[arguments] = promote(self, *arguments)
        return promoted[arguments]

    for name in ("is_int", "is_int_signed", "is_int_unsigned", "is_floating", "is_standard_floating", "kind"):
        patch.setattr(core.dtype, name, _by_name(getattr(core.dtype, name)))
    patch.setattr(interpreter, "_get_np_dtype", look_up_once)
    patch.setattr(core.dtype, "__eq__", equal_if_same)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap_what_is_wrapped)
    patch.setattr(TritonSemantic, "computation_type_impl", promote_once)


def _by_name(ask: Any) -> Any:
    known: dict[str, Any] = {}

    @functools.wraps(ask)
    def answer(self: Any) -> Any:
        name = self.name
        if name not in known:
            known[name] = ask(self)
        return known[name]

    return answer
