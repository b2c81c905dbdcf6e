"""A step's operations for CPUs in float32, compiled for the CPU at hand: the folder `cpu` is, at the start.

A call of a torch operator costs as much as a small product, and attention is dozens of them, which copy all
keys and values besides. Here a layer is seven calls.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import byref, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_models.engine.blocks import KVCache
from triton_models.engine.draw import row_keys
from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, CausalModel, Next, Norm, Rotary, StepLayout
from triton_models.engine.ops_torch import HostOperations, TorchOperations
from triton_models.engine.quantised import Int4Linear, Int8Linear
from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample
from triton_models.engine.sampling import GREEDY_BELOW

_SOURCES = Path(__file__).parent / "cpu"
_COMPILERS = "cc", "gcc", "clang"
_FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fwrapv", "-fopenmp"),
    *("-shared", "-fPIC", "-w", "-Wno-psabi"),
    # On some of these CPUs gcc would round products in some sums, and not in others that must be the same.
    *(("--param", "avoid-fma-max-bits=0") if platform.machine() in {"x86_64", "AMD64"} else ()),
)
_COMPILES_WITHIN_S = 60
_CPU = Path("/proc/cpuinfo")
_LANES = 16
"""The most that the sources' `LANES` are: the widths of norms are multiples of them."""
_SIZES = 16, 32, 64, 128
"""Sizes of KV blocks that its attention takes."""
_TILE_ROWS = 8
"""Most rows of a prompt that one thread takes at a time."""

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "product": (c_void_p, c_int64, c_void_p, c_void_p, c_int, c_void_p, c_int),
    "swiglu": (c_void_p, c_int64, c_int64, c_void_p),
    "rms_norm": (c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int),
    "choose": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int),
    "attend": (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p),
}


class _Step(ctypes.Structure):
    """`struct step` of the sources."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "slots", "tables", "tiles")),
        *((name, c_int64) for name in ("rows", "width", "tile_count")),
        *((name, c_int) for name in ("size", "heads", "kv_heads", "dim", "threads")),
    )


class _Matrix(ctypes.Structure):
    """`struct matrix` of the sources."""

    _fields_ = (
        *((name, c_void_p) for name in ("numbers", "scales", "zeros", "bias")),
        *((name, c_int64) for name in ("outputs", "columns")),
        ("kind", c_int),
    )


class _Rules(ctypes.Structure):
    """`struct rules` of the sources."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("temperatures", "keys", "top_k", "top_p", "min_p", "scratch")
    )


_KINDS = {torch.float32: 0, torch.int8: 1, torch.uint8: 2, torch.bfloat16: 3, torch.float16: 4}
"""`enum kind` of the sources, by the dtype of a matrix's numbers: uint8 holds two of 4 bits."""


class _Activation(IntEnum):
    """`enum activation` of the sources."""

    NONE = 0
    SWIGLU = 1
    GELU = 2


class NotCompiledError(Exception):
    """The operations cannot be had on this machine; the message says why."""


def compiled() -> ctypes.CDLL:
    """Compile the operations for this CPU, unless that was done before, and return them.

    It takes a second. What comes of it is kept in the user's folder for caches, if that can be written.

    Raises:
        NotCompiledError: there is no compiler, or all of them failed.
    """
    made = _compiled()
    if isinstance(made, str):
        raise NotCompiledError(made)
    return made


@cache
def _compiled() -> ctypes.CDLL | str:
    """Return the operations, or why there are none."""
    why = "no C compiler was found"
    named = os.environ.get("CC", "").split()
    for program, *options in [named] if named else [[each] for each in _COMPILERS]:
        compiler = shutil.which(program)
        if compiler is None:
            continue
        try:
            loaded = _load([compiler, *options])
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines() or [f"it ended with {error.returncode}"]
            why = f"{compiler}: {next((line for line in lines if 'error' in line), lines[0])}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        else:
            for name, types in _ARGUMENTS.items():
                function = getattr(loaded, name)
                function.argtypes, function.restype = types, None
            loaded.lanes.argtypes, loaded.lanes.restype = (), c_int
            return loaded
    return why


def _load(compiler: list[str]) -> ctypes.CDLL:
    kept = _cache_folder() / f"cpu-{_fingerprint(compiler)}.so"
    with contextlib.suppress(OSError):
        if _is_whole(kept):
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="tritongate-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "cpu.so"
        command = [*compiler, *_FLAGS, "-o", str(library), *map(str, sorted(_SOURCES.glob("*.c"))), "-lm"]
        subprocess.run(  # noqa: S603 - our own sources
            command, check=True, capture_output=True, text=True, errors="replace", timeout=_COMPILES_WITHIN_S
        )
        with contextlib.suppress(OSError):
            _keep(library, kept)
            # Perhaps the other folder is one whose files cannot be executed.
            return ctypes.CDLL(str(kept))
        # Once loaded, the file may go.
        return ctypes.CDLL(str(library))


def _keep(library: Path, kept: Path) -> None:
    """Copy a library to its place all at once, with its digest behind it, which loading leaves alone."""
    contents = library.read_bytes()
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as copy:
        try:
            copy.write(contents + hashlib.sha256(contents).digest())
            copy.flush()
            os.fsync(copy.fileno())
            Path(copy.name).replace(kept)
        except OSError:
            Path(copy.name).unlink(missing_ok=True)
            raise


def _is_whole(kept: Path) -> bool:
    """Whether a kept library is as it was written: half of one ends the process that loads it."""
    contents = kept.read_bytes()
    digest = hashlib.sha256(contents[: -hashlib.sha256().digest_size]).digest()
    return contents.endswith(digest)


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tritongate"
    except RuntimeError:  # a user without a home
        return Path(os.devnull)  # where nothing can be kept


def _fingerprint(compiler: list[str]) -> str:
    """Return what tells apart what different compilers make of different sources for different CPUs."""
    lines = set(_CPU.read_text(encoding="utf-8", errors="replace").splitlines()) if _CPU.exists() else set()
    cpu = sorted(line for line in lines if line.startswith(("flags", "Features", "model name")))
    parts = [*compiler, str(Path(compiler[0]).stat().st_mtime_ns), *_FLAGS, *(cpu or [platform.node()])]
    contents = [path.read_bytes() for path in sorted(_SOURCES.iterdir()) if path.suffix in {".c", ".h"}]
    return hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *contents])).hexdigest()[:32]


def cpu_operations(model: CausalModel, cache: KVCache, rows: int) -> "CpuOperations | TorchOperations":
    """Return the compiled operations, or torch's where blocks have a size for which there are none.

    Raises:
        NotCompiledError: see `compiled`.
    """
    if cache.block_size not in _SIZES:
        return TorchOperations(model, cache, rows)
    return CpuOperations(model, cache)


class CompiledLinear(Linear):
    """A matrix in the order in which the compiled product reads it; inputs and results are float32.

    `weight`: the numbers of the matrix, and zeros that make its halves whole panels: [panels, K, 2, lanes] in
    their dtype; or [panels, K, lanes] uint8 of 4 bits each, of both halves. Numbers of 16 bits become float32
    on their way into the product, which is what it would be of float32 ones, bit by bit.
    """

    def __init__(self, plain: Linear) -> None:
        self._compiled = compiled()
        self.outputs = len(plain.weight)
        self._lanes: int = self._compiled.lanes()
        self._panels: int = -(-self.outputs // (2 * self._lanes))
        kind, numbers, scales, zeros = _KINDS[plain.weight.dtype], plain.weight, None, None
        if isinstance(plain, Int8Linear):
            scales = self._padded(plain.scales.float())
        elif isinstance(plain, Int4Linear):
            numbers = plain.numbers(0, self.outputs).flatten(1)[:, : plain.columns]
            scale, zero = plain.scales.float().unbind(-1)
            scales, zeros = self._padded(scale.T).T, self._padded((zero - 8 * scale).T).T
        columns = numbers.shape[1]
        halves = self._padded(numbers).view(2, self._panels, self._lanes, columns)
        if isinstance(plain, Int4Linear):
            weight = (halves[0] | (halves[1] << 4)).transpose(1, 2).contiguous()
        else:
            weight = halves.permute(1, 3, 0, 2).contiguous()
        super().__init__(weight, None if plain.bias is None else plain.bias.float())
        self._kept = [each if each is None else each.contiguous() for each in (scales, zeros, self.bias)]
        pointers = [each if each is None else each.data_ptr() for each in (weight, *self._kept)]
        self._matrix = _Matrix(*pointers, self.outputs, columns, kind)

    def _padded(self, rows: Tensor) -> Tensor:
        """Return [N, ...] numbers of so many rows as panels have."""
        missing = 2 * self._panels * self._lanes - len(rows)
        return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`: [T, K] gives [T, N]."""
        return self.product(inputs)

    def add(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return `hidden + inputs @ weight.T + bias`: [T, N] and [T, K] give [T, N]."""
        return self.product(inputs, added=hidden.contiguous())

    def product(
        self, inputs: Tensor, *, added: Tensor | None = None, activation: _Activation = _Activation.NONE
    ) -> Tensor:
        """Return the product, [T, N]; by SWIGLU, silu(first half) * second half, [T, N / 2]."""
        inputs = inputs.contiguous()
        rows, width = len(inputs), self.outputs
        if activation is _Activation.SWIGLU:
            width //= 2
        results = torch.empty((rows, width), dtype=torch.float32)
        self._compiled.product(
            *(inputs.data_ptr(), rows, byref(self._matrix), added if added is None else added.data_ptr()),
            *(activation, results.data_ptr(), torch.get_num_threads()),
        )
        return results

    @property
    def whole(self) -> bool:
        """Whether no panel has zeros, as gated products need."""
        return self.outputs == 2 * self._panels * self._lanes


_FORMS = Linear, Int8Linear, Int4Linear


def compile_linear(matrix: Linear) -> Linear:
    """Return a matrix in its compiled form; one that has none, or is in it already, as it is."""
    return CompiledLinear(matrix) if type(matrix) in _FORMS else matrix


class CpuOperations(HostOperations):
    """`StepOperations` by compiled code; all tensors are float32, on the CPU.

    The order of the numbers in a block of the cache is its own. As long as all are finite, a row's results
    depend neither on the other rows of the step nor on how its sequence was divided into steps.
    """

    clears_blocks = False

    def __init__(self, model: CausalModel, cache: KVCache) -> None:
        self._compiled = compiled()
        self._cache = cache
        self._step = _Step(
            size=cache.block_size,
            heads=model.query_heads,
            kv_heads=model.kv_shape.heads,
            dim=model.kv_shape.head_dim,
        )
        self._width = model.query_heads * model.kv_shape.head_dim

    def begin(self, layout: StepLayout) -> None:
        """Divide the rows of a step among threads."""
        self.positions = layout.positions
        starts = list(range(len(layout.decode_lengths)))
        for chunk in layout.chunks:
            starts += range(chunk.start, chunk.end, _TILE_ROWS)
        rows = len(layout.positions)
        tiles = torch.tensor([*starts, rows], dtype=torch.int32)
        self._kept = layout, tiles  # what the pointers lead to
        step = self._step
        step.positions, step.slots = layout.positions.data_ptr(), layout.slots.data_ptr()
        step.tables, step.width = layout.tables.data_ptr(), layout.tables.shape[1]
        step.tiles, step.tile_count = tiles.data_ptr(), len(starts)
        step.rows, step.threads = rows, torch.get_num_threads()

    def attend(
        self,
        layer: int,
        projected: Tensor,
        rotary: Rotary | Alibi | None,
        *,
        then: Next | None = None,  # noqa: ARG002 - nothing is done ahead
    ) -> Tensor:
        """Rotate, store and attend; see `Operations` for the shapes."""
        cache, projected = self._cache, projected.contiguous()
        attended = torch.empty((len(projected), self._width), dtype=torch.float32)
        cos = sin = slopes = None
        pairs = 0
        if isinstance(rotary, Rotary):
            cos, sin, pairs = rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1]
        elif rotary is not None:
            slopes = rotary.slopes.data_ptr()
        self._compiled.attend(
            *(byref(self._step), projected.data_ptr(), cos, sin, pairs, slopes),
            *(cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), attended.data_ptr()),
        )
        return attended

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [T, width]."""
        if norm.bias is not None or hidden.shape[-1] % _LANES:
            return super().norm(hidden, norm)
        hidden = hidden.contiguous()
        normed = torch.empty_like(hidden)
        arguments = hidden.data_ptr(), *hidden.shape, norm.weight.data_ptr(), norm.epsilon
        self._compiled.rms_norm(*arguments, normed.data_ptr(), torch.get_num_threads())
        return normed

    def linear_swiglu(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return silu(first half) * second half of `matrix(inputs)`."""
        if isinstance(matrix, CompiledLinear) and matrix.whole:
            return matrix.product(self._normed(inputs, norm), activation=_Activation.SWIGLU)
        product = self.linear(inputs, matrix, norm=norm)
        result = product.new_empty((len(product), product.shape[1] // 2))
        self._compiled.swiglu(product.data_ptr(), *result.shape, result.data_ptr())
        return result

    def linear_gelu(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return GELU of `matrix(inputs)`, in its form with tanh."""
        if isinstance(matrix, CompiledLinear):
            return matrix.product(self._normed(inputs, norm), activation=_Activation.GELU)
        return super().linear_gelu(inputs, matrix, norm=norm)

    def _normed(self, inputs: Tensor, norm: Norm | None) -> Tensor:
        return inputs if norm is None else self.norm(inputs, norm)


def choose(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Choose tokens by compiled code; a `Chooser`."""
    logits = logits.contiguous()
    (rows, vocabulary), threads = logits.shape, torch.get_num_threads()
    status = torch.empty((3, rows), dtype=torch.int64)
    temperatures = inputs.temperatures.where(inputs.temperatures >= GREEDY_BELOW, 0)
    keys = row_keys(inputs.seeds.numpy(), inputs.counters.numpy())
    rules = _Rules(temperatures.data_ptr(), keys.ctypes.data)
    if inputs.truncated:
        limits = [each.contiguous() for each in (inputs.top_k, inputs.top_p, inputs.min_p)]
        scratch = torch.empty((threads, 3, vocabulary + _LANES), dtype=torch.int32)
        rules.top_k, rules.top_p, rules.min_p = (each.data_ptr() for each in limits)
        rules.scratch = scratch.data_ptr()
    compiled().choose(logits.data_ptr(), rows, vocabulary, byref(rules), status.data_ptr(), threads)
    return status


def cpu_sample(logits: Tensor, inputs: SamplerInputs) -> SamplerOutputs:
    """Return a step's tokens; see `sample`."""
    return sample(logits, inputs, choose)
