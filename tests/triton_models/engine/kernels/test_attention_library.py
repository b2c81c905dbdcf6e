from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from triton_models.engine.kernels import attention_library
from triton_models.engine.kernels.attention_library import Earlier, attend_earlier, has_library, long_chunk
from triton_models.engine.kernels.attention_prefill import (
    PrefillConfig,
    make_tiles,
    prefill_attention,
    queries_per_tile,
)
from triton_models.engine.models import ChunkRows

CONFIG = PrefillConfig(rows=16, keys=16, warps=4, stages=2)


def plainly(
    queries: Tensor, keys: Tensor, values: Tensor, *, attn_bias: None, compute_log_sumexp: bool
) -> tuple[Tensor, Tensor]:
    """As the library does: queries [1, H, T, D], keys [1, KV heads, S, D]."""
    assert attn_bias is None
    assert compute_log_sumexp
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = queries.double() @ keys.mT * queries.shape[-1] ** -0.5
    sums = (scores.softmax(-1) @ values).to(queries.dtype)
    return sums, scores.logsumexp(-1, keepdim=True).float()


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 16), (3, 24)])
def test_our_kernel_goes_on_from_what_the_library_knows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, *, in_blocks: bool, group: int, head_dim: int
) -> None:
    """Beside chunks and decodes of other sequences, which it has nothing to do with."""
    monkeypatch.setattr(attention_library, "KEYS", 32)
    if not has_library(device, torch.bfloat16, head_dim):
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", plainly, raising=False)
    shape = Shape(group=group, head_dim=head_dim)
    offsets, counts = [3, 75, 0], [4, 20, 6]
    lengths = [offset + count for offset, count in zip(offsets, counts, strict=True)]
    case = PagedCase(lengths, shape, dtype=torch.bfloat16, device=device)
    queries = [case.random(count, shape.query_heads) for count in counts]
    chunks, row = [], 2
    for slot, offset, count in zip(case.table_rows, offsets, counts, strict=True):
        chunks.append(ChunkRows(slot, row, row + count, offset))
        row += count
    rows = torch.cat([case.random(2, shape.query_heads), *queries])
    earlier = attend_earlier(rows, case.keys, case.values, case.tables, chunks[1])
    assert earlier.keys == 64
    tile = queries_per_tile(shape.query_heads, shape.kv_heads, CONFIG)
    tiles = torch.tensor(make_tiles(chunks, tile), dtype=torch.int32, device=device)
    out = torch.zeros_like(rows)
    config = PrefillConfig(rows=16, keys=16, warps=4, stages=2, in_blocks=in_blocks)
    prefill_attention(rows, case.keys, case.values, case.tables, tiles, out, config=config, earlier=earlier)
    for number, chunk in enumerate(chunks):
        assert_close(out[chunk.start : chunk.end], case.attend(number, queries[number], offsets[number]))
    nothing = Earlier(
        sums=torch.zeros_like(earlier.sums), logs=earlier.logs, slot=earlier.slot, keys=earlier.keys
    )
    prefill_attention(rows, case.keys, case.values, case.tables, tiles, out, config=config, earlier=nothing)
    first, second, third = (out[chunk.start : chunk.end] for chunk in chunks)
    assert_close(first, case.attend(0, queries[0], offsets[0]))
    assert_close(third, case.attend(2, queries[2], offsets[2]))
    with pytest.raises(AssertionError):
        assert_close(second, case.attend(1, queries[1], offsets[1]))


def test_a_long_chunk_is_all_of_a_large_step_and_follows_many_tokens() -> None:
    long = ChunkRows(slot=2, start=0, end=1024, offset=8192)
    assert long_chunk([long]) == long
    assert long_chunk([]) is None
    assert long_chunk([replace(long, end=448)]) is None
    assert long_chunk([replace(long, offset=8191)]) is None
    assert long_chunk([replace(long, end=1000)]) is None, "a number met once"
    assert long_chunk([replace(long, start=3)]) is None, "behind decodes"
    assert long_chunk([long, ChunkRows(slot=1, start=1024, end=1088, offset=0)]) is None


def test_the_library_is_for_hopper() -> None:
    assert not has_library(torch.device("cpu"), torch.bfloat16, 128)
