"""Sequences in scattered blocks of a KV cache, and what attention over them must give."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.triton_models.engine.rotated import rotate_in_place
from triton_models.engine.backend import StepOperations
from triton_models.engine.blocks import KVCache
from triton_models.engine.models import Alibi, ChunkRows, KVShape, Rotary, StepLayout
from triton_models.engine.ops_torch import split_heads


@dataclass(frozen=True)
class Heads:
    """The numbers of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def model(self) -> SimpleNamespace:
        """What operations ask of a model."""
        shape = KVShape(layers=2, heads=self.kv_heads, head_dim=self.head_dim)
        return SimpleNamespace(query_heads=self.heads, kv_shape=shape, dtype=torch.float32)

    def cache(self, blocks: int, block_size: int) -> KVCache:
        """Return a cache of two layers, whose blocks hold what is not a number."""
        shape = self.model.kv_shape
        cache = KVCache(
            shape, blocks=blocks, block_size=block_size, dtype=torch.float32, device=torch.device("cpu")
        )
        cache.keys[:, 1:] = torch.nan
        cache.values[:, 1:] = torch.nan
        return cache


def naive(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Causal attention of a whole sequence, by its definition, in float64."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    length, heads, size = queries.shape
    keys, values = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (keys, values))
    distances = torch.arange(length) - torch.arange(length)[:, None]
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / size**0.5
    if slopes is not None:
        scores += slopes.double()[:, None, None] * distances
    weights = scores.masked_fill(distances > 0, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


class PagedSequence:
    """A sequence's queries, keys and values, and the scattered blocks it is stored in."""

    def __init__(
        self, length: int, blocks: list[int], heads: Heads, rotary: Rotary | Alibi | None = None
    ) -> None:
        self.projected = torch.randn(length, heads.heads + 2 * heads.kv_heads, heads.head_dim)
        self.blocks = blocks
        turned = self.projected.clone()
        queries, keys, values = split_heads(turned, heads.kv_heads)
        slopes = rotary.slopes if isinstance(rotary, Alibi) else None
        if isinstance(rotary, Rotary):
            rotate_in_place(
                turned[:, : -heads.kv_heads], rotary.cos[:length, None], rotary.sin[:length, None]
            )
        self.expected = naive(queries, keys, values, slopes)


Decodes = list[tuple[PagedSequence, int]]
"""Sequences, and the position that each computes."""
Chunks = list[tuple[PagedSequence, int, int]]
"""Sequences, and the position that each computes from, and to before which."""


def layout(decodes: Decodes, chunks: Chunks, block_size: int) -> StepLayout:
    """Return what a step of these computes."""
    parts = [(each, at, at + 1) for each, at in decodes] + chunks
    tables = torch.zeros((len(parts), max(len(each.blocks) for each, _, _ in parts)), dtype=torch.int32)
    layout_chunks = []
    row = 0
    for slot, (each, start, end) in enumerate(parts):
        used = each.blocks[: -(-end // block_size)]
        tables[slot, : len(used)] = torch.tensor(used)
        if slot >= len(decodes):
            layout_chunks.append(ChunkRows(slot, row, row + end - start, start))
        row += end - start
    slots = [slot for slot, (_, start, end) in enumerate(parts) for _ in range(start, end)]
    return StepLayout(
        tables=tables,
        slots=torch.tensor(slots, dtype=torch.int32),
        positions=torch.tensor([at for _, start, end in parts for at in range(start, end)]),
        decode_lengths=torch.tensor([at + 1 for _, at in decodes], dtype=torch.int32),
        longest_decode=max((at + 1 for _, at in decodes), default=0),
        chunks=tuple(layout_chunks),
    )


def attend(
    operations: StepOperations,
    block_size: int,
    layer: int,
    decodes: Decodes,
    chunks: Chunks,
    *,
    rotary: Rotary | Alibi | None = None,
) -> Tensor:
    """Run a step, and compare every row."""
    parts = [(each, at, at + 1) for each, at in decodes] + chunks
    projected = torch.cat([each.projected[start:end] for each, start, end in parts])
    expected = torch.cat([each.expected[start:end] for each, start, end in parts]).flatten(1)
    operations.begin(layout(decodes, chunks, block_size))
    attended = operations.attend(layer, projected, rotary)
    assert attended.shape == expected.shape
    assert (attended - expected).abs().max() < 1e-5
    return attended


def attend_in_turns(
    step: Callable[[Decodes, Chunks], object],
    sequences: list[PagedSequence],
    numbers: random.Random,
    counts: tuple[int, ...] = (0, 1, 1, 3, 7),
) -> None:
    """Compute sequences side by side, `counts` tokens of each in a step, until all are done."""
    done = [0] * len(sequences)
    while any(at < len(each.expected) for each, at in zip(sequences, done, strict=True)):
        decodes, chunks = [], []
        for number, each in enumerate(sequences):
            count = min(len(each.expected) - done[number], numbers.choice(counts))
            if count == 1:
                decodes.append((each, done[number]))
            elif count:
                chunks.append((each, done[number], done[number] + count))
            done[number] += count
        if decodes or chunks:
            step(decodes, chunks)
