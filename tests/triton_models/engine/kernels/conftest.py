"""Runs the kernels under the Triton interpreter where there is no GPU, and compiled where there is one."""

import os
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()

if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("there is a driver but no GPU: set TRITON_INTERPRET=1")

import triton.language as tl  # noqa: E402 - after the choice above
from triton.runtime import interpreter  # noqa: E402

from tests.triton_models.engine.kernels.interpreter import hasten  # noqa: E402


def _correct_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Give the interpreter bfloat16 arithmetic.

    It keeps the raw 16 bits, takes them for integers in `dot`, in differences and in `fma`, and cuts
    conversions off instead of rounding them, also those to 8 bits.
    """
    convert: Any = interpreter._convert_float
    builder = interpreter.InterpreterBuilder
    dot: Any = builder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(handle.data)).view(torch.float8_e4m3fn)
            return interpreter.TensorHandle(numbers.float().numpy(), tl.float32)
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def corrected_convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return convert(data, source, target, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(data))
        if target == tl.float8e4nv:
            return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        rounded = exact.bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    def corrected_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widen(a), widen(b), *others)

    patch.setattr(interpreter, "_convert_float", corrected_convert)
    patch.setattr(builder, "create_dot", corrected_dot)
    for name in ("create_fsub", "create_fma"):
        patch.setattr(builder, name, _rounded(getattr(builder, name), widen, corrected_convert))


def _rounded(compute: Any, widen: Any, convert: Any) -> Any:
    """Return an operation that computes with wide numbers, and rounds what it makes of bfloat16."""

    def rounded(self: Any, *numbers: Any) -> Any:
        computed = compute(self, *map(widen, numbers))
        if numbers[0].dtype.scalar != tl.bfloat16:
            return computed
        return interpreter.TensorHandle(convert(computed.data, tl.float32, tl.bfloat16, None), tl.bfloat16)

    return rounded


@pytest.fixture(scope="session", autouse=True)
def interpreter_arithmetic() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            _correct_bfloat16(patch)
            hasten(patch)
        yield


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Any:
    """Let numpy compute what a kernel masks later, as a GPU does, without a warning."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")
