"""Weight matrices of 8 or 4 bits a weight: a quarter or half of the memory, and of what a decode step reads.

Only weights are quantised: activations, sums and the KV cache keep the model's dtype. Each class defines its
weights exactly (`dense`), and multiplies by them in plain torch on any device. Rows are quantised one by one
as they are filled in, so that loading never holds a second copy of the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from triton_models.engine.linear import Linear

GROUP: Final = 128
"""Weights of a row that share a scale and a zero in 4 bits."""

_SLICE_WEIGHTS = 2**23
"""Most weights that are quantised at once."""

_PRODUCT_WEIGHTS = 2**20
"""Most weights that are expanded for a product at once: so few stay in a CPU's caches, and no fresh memory is
mapped for them, which takes longer than the product."""

Stored = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Rows of a matrix as a quantised checkpoint has them, on the CPU."""

    numbers: Tensor
    """[N, K]: int8; or, with 4 bits, uint8 up to 15."""
    scales: Tensor
    """Float32: [N, 1], or [N, groups] with 4 bits."""
    zeros: Tensor | None = None
    """With 4 bits, [N, groups] float32, as in `Int4Linear`."""


def product_by_parts(inputs: Tensor, expand: Callable[[int, int], Tensor], starts: range) -> Tensor:
    """Return `inputs @ weight.T`, with a few of the weight's rows expanded at a time: [T, K] gives [T, N].

    `expand` returns the rows `start` to `stop` - 1, or fewer at the end, in the dtype of `inputs`.
    """
    parts = [functional.linear(inputs, expand(start, start + starts.step)) for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class QuantisedLinear(Linear):
    """A matrix of few bits a weight, [N, K], and a bias in the model's dtype, [N], or None.

    Args:
        weight: as the class stores it.
        scales: as the class stores them; bfloat16 has the range of float32.
        bias: [N], or None.
        columns: K.
        dtype: the model's.
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, *, columns: int, dtype: torch.dtype
    ) -> None:
        super().__init__(weight, bias)
        self.scales = scales
        self.columns = columns
        self.dtype = dtype

    @classmethod
    def stored(cls, rows: int, columns: int) -> tuple[Stored, Stored]:
        """Return what the weights and the scales of [N, K] weights are stored as: shapes and dtypes."""
        raise NotImplementedError

    @classmethod
    def bytes_for(cls, rows: int, columns: int, dtype: torch.dtype) -> int:  # noqa: ARG003 - the plain one's
        """Return the bytes of a matrix without bias."""
        return sum(math.prod(shape) * kind.itemsize for shape, kind in cls.stored(rows, columns))

    @classmethod
    def empty(cls, rows: int, columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Self:
        """Return a matrix to be filled."""
        weight, scales = (
            torch.empty(shape, dtype=kind, device=device) for shape, kind in cls.stored(rows, columns)
        )
        biases = torch.empty(rows, dtype=dtype, device=device) if bias else None
        return cls(weight, scales, biases, columns=columns, dtype=dtype)

    @property
    def place(self) -> "QuantisedRows":
        """What the checkpoint's tensor is copied to."""
        return QuantisedRows(self, 0, len(self.weight))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`: [T, K] gives [T, N]; expands a few of its rows at a time."""
        starts = range(0, len(self.weight), max(1, _PRODUCT_WEIGHTS // self.columns))
        product = product_by_parts(inputs, self.dense, starts)
        return product if self.bias is None else product.add_(self.bias)

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the weights of rows `start` to `stop` - 1, rounded to the dtype: [n, K]."""
        return self.exact(start, stop).to(self.dtype)

    def exact(self, start: int, stop: int) -> Tensor:
        """Return the weights of rows `start` to `stop` - 1 in float32: [n, K]."""
        raise NotImplementedError

    def quantise(self, start: int, rows: Tensor) -> None:
        """Store float32 `rows`, [n, K], on the matrix's device, from row `start` on.

        Raises:
            ValueError: a number is not finite.
        """
        raise NotImplementedError

    def store(self, start: int, rows: StoredWeights) -> None:
        """Store rows that are quantised already, in the way of this class, from row `start` on.

        Numbers are kept. Scales and zeros are kept if the model's dtype is float32 on a CPU; otherwise they
        are rounded to bfloat16, which the products in 16 bits are made for.
        """
        raise NotImplementedError

    def _widen(self) -> None:
        """Make room for exact scales where products take them."""
        if self.dtype == torch.float32 and self.weight.device.type == "cpu":
            self.scales = self.scales.float()


class Int8Linear(QuantisedLinear):
    """Weights are `weight * scales[:, None]`: int8 in -127 to 127, [N, K], and a scale for each row, [N]."""

    @classmethod
    def stored(cls, rows: int, columns: int) -> tuple[Stored, Stored]:
        """Return what weights and scales are stored as."""
        return ((rows, columns), torch.int8), ((rows,), torch.bfloat16)

    def exact(self, start: int, stop: int) -> Tensor:
        """Return some rows' weights."""
        return self.weight[start:stop] * self.scales[start:stop, None].float()

    def quantise(self, start: int, rows: Tensor) -> None:
        """Store rows: the largest weight of each becomes 127 or little less."""
        scales = _scales(rows.abs().amax(dim=1) / 127)
        here = slice(start, start + len(rows))
        self.weight[here] = (rows / _divisors(scales)[:, None]).round_().clamp_(-127, 127)
        self.scales[here] = scales

    def store(self, start: int, rows: StoredWeights) -> None:
        """Store int8 rows."""
        self._widen()
        here = slice(start, start + len(rows.numbers))
        self.weight[here] = rows.numbers.to(self.weight.device)
        self.scales[here] = _finite(rows.scales)[:, 0].to(self.scales)


class Int4Linear(QuantisedLinear):
    """Weights are `(q - 8) * scale + zero`, with a scale and a zero for each `GROUP` weights of a row.

    `weight` is uint8, [N, groups * GROUP / 2]: byte j of a group holds q of its weight j in the low four bits
    and q of its weight j + GROUP / 2 in the high ones. The last group is filled up with weights that count
    for nothing. `scales` is [groups, N, 2]: scale and zero.
    """

    @classmethod
    def stored(cls, rows: int, columns: int) -> tuple[Stored, Stored]:
        """Return what weights and scales are stored as."""
        groups = -(-columns // GROUP)
        return ((rows, groups * GROUP // 2), torch.uint8), ((groups, rows, 2), torch.bfloat16)

    def exact(self, start: int, stop: int) -> Tensor:
        """Return some rows' weights."""
        scale, zero = self.scales[:, start:stop].float().transpose(0, 1).unbind(-1)
        numbers = self.numbers(start, stop).float().sub_(8).mul_(scale[..., None]).add_(zero[..., None])
        return numbers.flatten(1)[:, : self.columns]

    def quantise(self, start: int, rows: Tensor) -> None:
        """Store rows: the smallest and largest weights of each group become 0 and 15, or little within."""
        padding = -self.columns % GROUP
        groups = functional.pad(rows, (0, padding)).view(len(rows), -1, GROUP)
        least, most = groups.amin(dim=-1), groups.amax(dim=-1)
        scale = _scales((most - least) / 15)
        zero = (least + 8 * scale).bfloat16().float()
        numbers = (groups - zero[..., None]).div_(_divisors(scale)[..., None]).round_().add_(8).clamp_(0, 15)
        self._put(start, numbers.to(torch.uint8), scale, zero)

    def store(self, start: int, rows: StoredWeights) -> None:
        """Store rows of 4-bit numbers."""
        if rows.zeros is None:
            raise ValueError("has no zeros")
        self._widen()
        padded = functional.pad(rows.numbers.to(self.weight.device), (0, -self.columns % GROUP))
        numbers = padded.view(len(padded), -1, GROUP)
        self._put(start, numbers, _finite(rows.scales), _finite(rows.zeros))

    def _put(self, start: int, numbers: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Write rows: [n, groups, GROUP] uint8, scales and zeros of [n, groups]."""
        low, high = numbers.chunk(2, dim=-1)
        here = slice(start, start + len(numbers))
        self.weight[here] = (low | (high << 4)).flatten(1)
        self.scales[:, here] = torch.stack((scale, zero), dim=-1).transpose(0, 1).to(self.scales)

    def numbers(self, start: int, stop: int) -> Tensor:
        """Return q of the rows `start` to `stop` - 1: [n, groups, GROUP] uint8."""
        pairs = self.weight[start:stop]
        pairs = pairs.view(len(pairs), -1, GROUP // 2)
        return torch.cat((pairs & 15, pairs >> 4), dim=-1)


class Fp8Linear(QuantisedLinear):
    """Weights are `weight * scales[:, None]`: float8_e4m3fn, [N, K], and a float32 scale for each row, [N].

    On a GPU, the rows of `inputs` are rounded to the same 8 bits for the product; here they are not.
    """

    @classmethod
    def stored(cls, rows: int, columns: int) -> tuple[Stored, Stored]:
        """Return what weights and scales are stored as."""
        return ((rows, columns), torch.float8_e4m3fn), ((rows,), torch.float32)

    def exact(self, start: int, stop: int) -> Tensor:
        """Return some rows' weights."""
        return self.weight[start:stop].float() * self.scales[start:stop, None]

    def quantise(self, start: int, rows: Tensor) -> None:
        """Store rows: the largest weight of each becomes the format's largest number, or little less."""
        scales = _scales(rows.abs().amax(dim=1) / torch.finfo(torch.float8_e4m3fn).max)
        here = slice(start, start + len(rows))
        self.weight[here] = (rows / _divisors(scales)[:, None]).to(torch.float8_e4m3fn)
        self.scales[here] = scales


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows `start` to `stop` - 1 of a matrix, in the place of a tensor: what is copied to it is quantised."""

    matrix: QuantisedLinear
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tensor that can be copied."""
        return self.stop - self.start, self.matrix.columns

    @property
    def nbytes(self) -> int:
        """What the rows take."""
        return self.matrix.bytes_for(*self.shape, self.matrix.dtype)

    def split(self, heights: Sequence[int]) -> "list[QuantisedRows]":
        """Divide the rows, as `Tensor.split` does, for a checkpoint that has them as several tensors."""
        parts, start = [], self.start
        for height in heights:
            parts.append(QuantisedRows(self.matrix, start, start + height))
            start += height
        return parts

    def copy_(self, source: Tensor) -> None:
        """Quantise `source`, on the matrix's device, some rows at a time.

        Raises:
            ValueError: a number in it is not finite.
        """
        step = max(1, _SLICE_WEIGHTS // self.matrix.columns)
        for start in range(0, len(source), step):
            rows = source[start : start + step].to(self.matrix.weight.device).float()
            self.matrix.quantise(self.start + start, rows)

    def store(self, rows: StoredWeights) -> None:
        """Store rows that are quantised already."""
        self.matrix.store(self.start, rows)


QUANTISATIONS: Final[Mapping[str, type[QuantisedLinear]]] = MappingProxyType(
    {"int8": Int8Linear, "fp8": Fp8Linear, "int4": Int4Linear}
)
"""By the values of the option `quantization`; an advice names the first that fits."""

FP8_CAPABILITY: Final = (8, 9)
"""Ada: the first generation whose matrix units take numbers of 8 bits with a point."""


def _scales(numbers: Tensor) -> Tensor:
    """Return float32 numbers of at least 0, rounded up to bfloat16's: no weight is out of their reach.

    Raises:
        ValueError: one is not finite.
    """
    rounded = ((numbers.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    if not rounded.isfinite().all():
        raise ValueError("holds numbers that are not finite")
    return rounded


def _finite(numbers: Tensor) -> Tensor:
    """Return `numbers`.

    Raises:
        ValueError: one is not finite.
    """
    if not numbers.isfinite().all():
        raise ValueError("has scales that are not finite")
    return numbers


def _divisors(scales: Tensor) -> Tensor:
    """Return `scales`, with 1 for those of weights that are all the same."""
    return scales.masked_fill(scales == 0, 1.0)
