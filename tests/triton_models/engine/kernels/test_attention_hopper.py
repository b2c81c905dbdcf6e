"""Only a Hopper GPU runs this kernel, for which there is no interpreter; `test_shared_memory` compiles it."""

import pytest
import torch

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from triton_models.engine.kernels.attention_hopper import TILE_ROWS, attend, fits
from triton_models.engine.kernels.attention_prefill import make_tiles, prefill_config, queries_per_tile
from triton_models.engine.models import ChunkRows, Tile

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


def check(case: PagedCase, offsets: list[int], *, programs: int, padding: int = 0) -> None:
    """Attend to every sequence from its offset on, in one launch behind two rows of others; compare."""
    shape = case.shape
    config = prefill_config(shape.head_dim, torch.bfloat16, block_size=64, rows=2048, specialised=True)
    assert (config.rows, config.specialised) == (TILE_ROWS, True)
    counts = [length - offset for length, offset in zip(case.lengths, offsets, strict=True)]
    queries = [case.random(count, shape.query_heads) for count in counts]
    chunks, start = [], 2
    for row, count, offset in zip(case.table_rows, counts, offsets, strict=True):
        chunks.append(ChunkRows(row, start, start + count, offset))
        start += count
    tiles = make_tiles(chunks, queries_per_tile(shape.query_heads, shape.kv_heads, config))
    tiles += [Tile(0, 0, 0, 0)] * padding
    rows = torch.cat([case.random(2, shape.query_heads), *queries, case.random(5, shape.query_heads)])
    # As the engine has them: the first heads of a wider product.
    projected = torch.cat([rows, case.random(len(rows), 2 * shape.kv_heads)], 1)
    out = torch.full_like(rows, torch.nan)
    attend(
        projected[:, : shape.query_heads], case.keys, case.values, case.tables,
        torch.tensor(tiles, dtype=torch.int32, device=case.device), out, programs=programs,
    )  # fmt: skip
    assert out[:2].isnan().all()
    assert out[start:].isnan().all()
    for number, chunk in enumerate(chunks):
        assert_close(out[chunk.start : chunk.end], case.attend(number, queries[number], offsets[number]))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (4, 64), (7, 128), (1, 64)])
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_equals_direct_attention(
    device: torch.device, dtype: torch.dtype, group: int, head_dim: int, programs: int
) -> None:
    """Of chunks of any length behind any number of tokens, with more tiles than programs and with fewer."""
    offsets, counts = [0, 0, 64, 127, 129, 500, 1000], [1, 300, 65, 2, 127, 12, 200]
    lengths = [offset + count for offset, count in zip(offsets, counts, strict=True)]
    case = PagedCase(
        lengths, Shape(group=group, head_dim=head_dim, block_size=64), dtype=dtype, device=device
    )
    check(case, offsets, programs=programs, padding=9)


@on_hopper
def test_blocks_may_hold_several_copies(device: torch.device) -> None:
    shape = Shape(group=16, head_dim=128, block_size=192)
    case = PagedCase([700, 65, 193], shape, dtype=torch.bfloat16, device=device)
    check(case, [260, 0, 191], programs=132)


@on_hopper
def test_the_same_bits_again_and_whatever_is_beside_a_row(device: torch.device) -> None:
    shape = Shape(group=16, head_dim=128, block_size=64)
    case = PagedCase([3000, 200], shape, dtype=torch.bfloat16, device=device)
    queries = case.random(600, shape.query_heads)

    def attended(chunks: list[ChunkRows], programs: int) -> torch.Tensor:
        tiles = torch.tensor(make_tiles(chunks, 8), dtype=torch.int32, device=device)
        out = torch.zeros_like(queries)
        attend(queries, case.keys, case.values, case.tables, tiles, out, programs=programs)
        return out[:400]

    long, short = (case.table_rows[number] for number in range(2))
    expected = attended([ChunkRows(long, 0, 400, 2600)], 132)
    for programs in (3, 132) * 5:
        both = [ChunkRows(long, 0, 400, 2600), ChunkRows(short, 400, 600, 0)]
        assert torch.equal(attended(both, programs), expected)


@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "block_size", "expected"),
    [
        (torch.bfloat16, 16, 128, 64, True),
        (torch.float16, 1, 64, 128, True),
        (torch.float32, 16, 128, 64, False),
        (torch.bfloat16, 129, 128, 64, False),
        (torch.bfloat16, 16, 80, 64, False),
        (torch.bfloat16, 16, 256, 64, False),
        (torch.bfloat16, 16, 128, 16, False),
    ],
)
def test_what_it_takes(
    dtype: torch.dtype, group: int, head_dim: int, block_size: int, *, expected: bool
) -> None:
    assert fits(dtype, group, head_dim, block_size) is expected
