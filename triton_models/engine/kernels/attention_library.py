"""Attention of many new tokens to many earlier ones by cuDNN, which takes less time for it than our kernel.

It knows neither blocks nor masks that suit chunks of prompts. But of what precedes a chunk nothing is masked,
and copied together it is small. Our kernel goes on from there (`Earlier`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from triton_models.engine.models import ChunkRows

KEYS: Final = 4096
"""Earlier tokens are taken by so many: each number of them takes cuDNN some 40 ms once."""

LEAST_KEYS: Final = 2 * KEYS
"""With fewer there is nothing to gain."""

_LEAST_ROWS = 512
_MULTIPLE = 64
"""Steps of other numbers of rows, as prompts end with, are not worth these 40 ms."""

_LARGEST_HEAD = 128
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What the rows of a step got of a sequence's first keys, if they are of that sequence."""

    sums: Tensor
    """[T, query heads, head_dim], weighted sums of values, normalised."""
    logs: Tensor
    """[query heads, T] float32, the natural logarithm of the sum of the scaled scores' exponentials."""
    slot: int
    keys: int
    """Number of these keys, a multiple of `KEYS`."""


def has_library(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether there is such attention, and gains: measured on Hopper only (bench/LOG.md)."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == _HOPPER
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= _LARGEST_HEAD
        and head_dim % 8 == 0
        and bool(torch.backends.cudnn.is_available())
        and hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention")
    )


def long_chunk(chunks: Sequence[ChunkRows]) -> ChunkRows | None:
    """Return the chunk whose earlier keys are for the library: one that is all of a large step.

    Beside decodes, steps that are not captured showed no gain (bench/LOG.md).
    """
    if len(chunks) != 1 or chunks[0].start:
        return None
    (chunk,) = chunks
    large = chunk.end >= _LEAST_ROWS and chunk.end % _MULTIPLE == 0
    return chunk if large and chunk.offset >= LEAST_KEYS else None


def attend_earlier(
    queries: Tensor, keys: Tensor, values: Tensor, tables: Tensor, chunk: ChunkRows
) -> Earlier:
    """Attend all rows of a step to the first keys of one sequence, scaled by head_dim ** -0.5.

    What is copied, 128 MiB for 131,072 tokens of two KV heads, is of what `GPU_SHARE` leaves.

    Args:
        queries: [T, query heads, head_dim]; tokens may be strided.
        keys: [blocks, block_size, KV heads, head_dim]; `KEYS` are whole blocks.
        values: like `keys`.
        tables: [S, W] int32, block numbers.
        chunk: from `long_chunk`.
    """
    count = chunk.offset // KEYS * KEYS
    blocks = tables[chunk.slot, : count // keys.shape[1]]
    key, value = (each.index_select(0, blocks).flatten(0, 1) for each in (keys, values))
    sums, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - sums without `logs` are of no use
        *(each.transpose(0, 1)[None] for each in (queries, key, value)),
        attn_bias=None,
        compute_log_sumexp=True,
    )
    rows, heads, _ = queries.shape
    return Earlier(
        sums=sums[0].transpose(0, 1).contiguous(), logs=logs.reshape(heads, rows), slot=chunk.slot, keys=count
    )
