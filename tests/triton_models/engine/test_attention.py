import random

import pytest
import torch
from torch import Tensor

from triton_models.engine.attention import PagedAttention, PrefillChunk, StepLayout
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.model import KVShape

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4


def naive(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of a whole sequence, head by head and position by position, in float64."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    result = torch.empty_like(queries)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        for position in range(len(queries)):
            scores = keys[: position + 1, shared] @ queries[position, head] / HEAD_DIM**0.5
            result[position, head] = scores.softmax(0) @ values[: position + 1, shared]
    return result


class PagedSequence:
    """A sequence's queries, keys and values, and the scattered blocks it is stored in."""

    def __init__(self, length: int, blocks: list[int]) -> None:
        self.queries = torch.randn(length, HEADS, HEAD_DIM)
        self.keys = torch.randn(length, KV_HEADS, HEAD_DIM)
        self.values = torch.randn(length, KV_HEADS, HEAD_DIM)
        self.blocks = blocks
        self.expected = naive(self.queries, self.keys, self.values)

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end)]


def attend(
    cache: KVCache,
    layer: int,
    decodes: list[tuple[PagedSequence, int]],
    chunks: list[tuple[PagedSequence, int, int]],
) -> None:
    """Run a step and compare every row: decodes as (sequence, position), chunks as (sequence, start, end)."""
    parts = [(each, at, at + 1) for each, at in decodes] + chunks
    width = max((at // BLOCK_SIZE + 1 for _, at in decodes), default=0)
    table = [(each.blocks[: at // BLOCK_SIZE + 1] + [0] * width)[:width] for each, at in decodes]
    layout_chunks = []
    row = len(decodes)
    for each, start, end in chunks:
        blocks = torch.tensor(each.blocks[: -(-end // BLOCK_SIZE)])
        layout_chunks.append(PrefillChunk(row, row + end - start, start, blocks))
        row += end - start
    layout = StepLayout(
        slots=torch.tensor([slot for each, start, end in parts for slot in each.slots(start, end)]),
        decode_blocks=torch.tensor(table, dtype=torch.int64).view(len(decodes), width),
        decode_lengths=torch.tensor([at + 1 for _, at in decodes], dtype=torch.int64),
        chunks=tuple(layout_chunks),
    )
    attended = PagedAttention(cache, layout)(
        layer,
        torch.cat([each.queries[start:end] for each, start, end in parts]),
        torch.cat([each.keys[start:end] for each, start, end in parts]),
        torch.cat([each.values[start:end] for each, start, end in parts]),
    )
    expected = torch.cat([each.expected[start:end] for each, start, end in parts])
    assert attended.shape == expected.shape
    assert (attended - expected).abs().max() < 1e-5


@pytest.fixture
def cache() -> KVCache:
    torch.manual_seed(3)
    shape = KVShape(layers=2, heads=KV_HEADS, head_dim=HEAD_DIM)
    cache = KVCache(shape, blocks=30, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"))
    # What a block holds before it is cleared is nobody's business.
    cache.keys[:, 1:] = torch.nan
    cache.values[:, 1:] = torch.nan
    cache.clear(torch.arange(1, 31))
    return cache


def test_any_mixture_of_decodes_and_chunks_equals_whole_sequences(cache: KVCache) -> None:
    numbers = random.Random(1)
    blocks = list(range(1, 31))
    numbers.shuffle(blocks)
    sequences = [PagedSequence(length, [blocks.pop() for _ in range(8)]) for length in (32, 17, 5)]
    done = [0, 0, 0]
    while any(at < len(each.queries) for each, at in zip(sequences, done, strict=True)):
        decodes, chunks = [], []
        for number, each in enumerate(sequences):
            left = len(each.queries) - done[number]
            count = min(left, numbers.choice([0, 1, 1, 3, 7]))
            if count == 1:
                decodes.append((each, done[number]))
            elif count:
                chunks.append((each, done[number], done[number] + count))
            done[number] += count
        if decodes or chunks:
            attend(cache, 1, decodes, chunks)
    assert not cache.keys[0].any()


def test_a_prompt_in_one_chunk(cache: KVCache) -> None:
    attend(cache, 0, [], [(PagedSequence(13, [4, 2, 9, 7]), 0, 13)])


def test_cleared_blocks_hold_no_nan_of_their_last_holder(cache: KVCache) -> None:
    cache.keys[:, 3] = torch.nan
    cache.values[:, 3] = torch.nan
    cache.clear(torch.tensor([3]))
    attend(cache, 0, [(PagedSequence(1, [3]), 0)], [(PagedSequence(2, [5]), 0, 2)])


def test_reset_makes_padding_clean_again(cache: KVCache) -> None:
    cache.keys[:, 0] = torch.nan
    cache.values[:, 0] = torch.nan
    cache.reset()
    long, short = PagedSequence(9, [1, 2, 3]), PagedSequence(1, [4])
    attend(cache, 0, [], [(long, 0, 8)])
    attend(cache, 0, [(long, 8), (short, 0)], [])
