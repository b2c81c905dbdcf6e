"""Rows on their way from what makes them into a product, without a launch in between.

With few rows, a norm takes no longer than it takes to launch it. So what makes the rows, a product or
attention, also writes them as the next product's kernel takes them:

* RMSNorm's weight is applied at once, and the sum of squares of each block of 64 columns left. What the norm
  divides by, which only all of them tell, scales a row of the product as well as a row of its inputs.
* With weights of 4 bits, the sum of each block is needed beside its numbers.

In 8 bits, only attention does so. Every 128 columns have a scale of their own there, since none knows a whole
row; to sum those up apart costs a large product as much as the launch that rounds its rows (bench/LOG.md).
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.elementwise import norm, norm_row, norm_warps
from triton_models.engine.models import Norm

BLOCK = 64
"""Columns of a block."""

SCALED_BLOCK = 128
"""Columns of a block in 8 bits."""

MARKED_ROWS = 32
"""Most rows whose blocks have sums or scales."""

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_SCALED_BLOCK: tl.constexpr = tl.constexpr(SCALED_BLOCK)
_MARKED_ROWS: tl.constexpr = tl.constexpr(MARKED_ROWS)


@dataclass(frozen=True, slots=True)
class Rows:
    """M rows of K columns, in blocks of which the last may have fewer."""

    numbers: Tensor
    """[M, K], contiguous, in the dtype of the model."""
    sums: Tensor | None = None
    """[blocks, 32] float32: each block's sum, of M rows. A program reads those of all rows at once."""
    squares: Tensor | None = None
    """[M, blocks] float32: each block's sum of squares, before `norm`. None: nothing is left to be done."""
    norm: Norm | None = None
    """The RMSNorm by whose weight the numbers are multiplied, but which has yet to divide them."""

    @classmethod
    def empty(
        cls,
        rows: int,
        columns: int,
        *,
        sums: bool,
        norm: Norm | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return rows to be written, with sums or without; first they get `norm`, an RMSNorm."""
        return cls(
            torch.empty((rows, columns), dtype=dtype, device=device),
            new_marks(columns, BLOCK, device) if sums else None,
            None
            if norm is None
            else torch.empty((rows, -(-columns // BLOCK)), dtype=torch.float32, device=device),
            norm,
        )

    def written(self) -> tuple[Tensor | None, ...]:
        """Return what `leave` takes. Without a norm, the numbers are the result, and written anyway."""
        if self.norm is None:
            return None, None, self.sums, None
        return self.norm.weight, self.numbers, self.sums, self.squares

    @property
    def epsilon(self) -> float:
        """That of the norm; 0 without one."""
        return 0.0 if self.norm is None else self.norm.epsilon


NOTHING = (None, None, None, None)
"""What a kernel that leaves no rows takes in the place of `Rows.written`."""


def new_marks(columns: int, block: int, device: torch.device) -> Tensor:
    """Return what blocks' sums or scales are written to: [blocks, 32] float32."""
    return torch.empty((-(-columns // block), MARKED_ROWS), dtype=torch.float32, device=device)


def prepare(x: Tensor, before: Norm | None = None, *, sums: bool = False) -> Rows:
    """Return `x`, [M, K], contiguous, or its norm, with sums or without, in a launch if any is needed."""
    if not sums:
        return Rows(x if before is None else norm(x, before.weight, before.epsilon, before.bias))
    rows, columns = x.shape
    made = Rows.empty(rows, columns, sums=True, norm=None, dtype=x.dtype, device=x.device)
    padded = max(BLOCK, triton.next_power_of_2(columns))
    _prepare[rows,](
        x,
        None if before is None else before.weight,
        None if before is None else before.bias,
        0.0 if before is None else before.epsilon,
        (None, made.numbers, made.sums, None),
        COLUMNS=columns,
        PADDED=padded,
        num_warps=norm_warps(padded),
    )
    return made


def padded_blocks(columns: int) -> int:
    """Return the `PADDED` of `load_squares`."""
    return int(triton.next_power_of_2(-(-columns // BLOCK)))


@triton.jit
def _prepare(x, weight, bias, eps, rows, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, PADDED)
    part = tl.load(x + row.to(tl.int64) * COLUMNS + k, mask=k < COLUMNS, other=0.0).to(tl.float32)
    if weight is not None:
        part = norm_row(part, weight, bias, eps, k, COLUMNS)
    leave(part[None, :], rows, row + tl.arange(0, 1), k, row + 1, COLUMNS)


@triton.jit
def leave(part, ahead, m, n, rows, COLUMNS: tl.constexpr):
    """Write a part of rows, [M, N] float32, as the next product takes them.

    `m`: [M], the rows' numbers, below `rows`; `n`: [N], whole blocks of columns. `ahead`: the norm's weight,
    and where numbers, sums and squares go, each of which may be None.
    """
    if ahead[2] is not None or ahead[3] is not None:
        blocks: tl.constexpr = (COLUMNS + _BLOCK - 1) // _BLOCK
        inside = (m < rows)[:, None] & (n < COLUMNS)[None, :]
        part = tl.where(inside, part, 0.0)
        block = tl.min(tl.reshape(n, (n.shape[0] // _BLOCK, _BLOCK)), 1)[None, :] // _BLOCK
        exists = (m < rows)[:, None] & (block < blocks)
        if ahead[3] is not None:
            squares = tl.sum(in_blocks(part * part, _BLOCK), 2)
            tl.store(ahead[3] + m[:, None] * blocks + block, squares, mask=exists)
            part *= tl.load(ahead[0] + n, mask=n < COLUMNS, other=0.0)[None, :]
        if ahead[1] is not None:
            numbers = part.to(ahead[1].dtype.element_ty)
            tl.store(ahead[1] + m.to(tl.int64)[:, None] * COLUMNS + n[None, :], numbers, mask=inside)
            part = numbers.to(tl.float32)
        if ahead[2] is not None:
            tl.store(mark_places(ahead[2], m[:, None], block), block_sums(part), mask=exists)


@triton.jit
def in_blocks(part, SIZE: tl.constexpr):
    """Return [M, N] as [M, blocks, SIZE]."""
    return tl.reshape(part, (part.shape[0], part.shape[1] // SIZE, SIZE))


@triton.jit
def block_sums(numbers):
    """Return the sums of blocks, [M, blocks], of numbers as they are stored, [M, N]."""
    return tl.sum(in_blocks(numbers.to(tl.float32), _BLOCK), 2)


@triton.jit
def in_8_bits(part, dtype: tl.constexpr):
    """Return float32 numbers, [M, N], in a dtype of 8 bits, and what those of each block are times."""
    blocks = in_blocks(part, _SCALED_BLOCK)
    most = tl.max(tl.abs(blocks), 2)
    scales = tl.where(most == 0, 1.0, most / 448)
    return tl.reshape((blocks / scales[:, :, None]).to(dtype), part.shape), scales


@triton.jit
def mark_places(marks, m, block):
    """Return where the sums or scales of rows' blocks are."""
    return marks + block * _MARKED_ROWS + m


@triton.jit
def load_marks(marks, m, block, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Return the sums or scales of a block, [M]; beyond the last block, those of the last."""
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    return tl.load(mark_places(marks, m, tl.minimum(block, blocks - 1)))


@triton.jit
def load_squares(squares, m, rows, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Return what `norm_factors` takes, [M, PADDED]; None without a norm.

    To be loaded before a product's loop and used after it, so that nothing waits for it.
    """
    parts = None
    if squares is not None:
        blocks: tl.constexpr = (COLUMNS + _BLOCK - 1) // _BLOCK
        block = tl.arange(0, PADDED)
        mask = (m < rows)[:, None] & (block < blocks)[None, :]
        parts = tl.load(squares + m[:, None] * blocks + block[None, :], mask=mask, other=0.0)
    return parts


@triton.jit
def norm_factors(parts, eps, COLUMNS: tl.constexpr):
    """Return what is left of the rows' norm, [M]: a factor for each row of a product."""
    return tl.rsqrt(tl.sum(parts, 1) / COLUMNS + eps)
