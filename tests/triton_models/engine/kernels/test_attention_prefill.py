import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from triton_models.engine.kernels.attention_prefill import (
    PrefillConfig,
    make_tiles,
    prefill_attention,
    prefill_config,
    queries_per_tile,
)
from triton_models.engine.models import ChunkRows

SMALL = PrefillConfig(rows=16, keys=16, warps=4, stages=2)


def prefill(
    case: PagedCase,
    queries: list[Tensor],
    offsets: list[int],
    config: PrefillConfig = SMALL,
    slopes: Tensor | None = None,
) -> list[Tensor]:
    """Attend every sequence's queries in one launch, rows of the step in the sequences' order."""
    chunks, start = [], 0
    for row, part, offset in zip(case.table_rows, queries, offsets, strict=True):
        chunks.append(ChunkRows(row, start, start + len(part), offset))
        start += len(part)
    shape = case.shape
    tile = queries_per_tile(shape.query_heads, shape.kv_heads, config)
    tiles = torch.tensor(make_tiles(chunks, tile), dtype=torch.int32, device=case.device)
    # As the engine has them: the first heads of a wider product.
    projected = torch.cat(queries).repeat(1, 2, 1)
    out = torch.full((start, shape.query_heads, shape.head_dim), torch.nan).to(projected)
    prefill_attention(
        projected[:, : shape.query_heads], case.keys, case.values, case.tables, tiles, out,
        config=config, slopes=slopes,
    )  # fmt: skip
    return list(torch.split(out, [len(part) for part in queries]))


@given(
    chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 25)), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4, 16]),
    head_dim=st.sampled_from([16, 20]),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 1000),
)
@hypothesis_settings(max_examples=20)
def test_equals_direct_attention(
    *,
    device: torch.device,
    chunks: list[tuple[int, int]],
    group: int,
    head_dim: int,
    block_size: int,
    seed: int,
) -> None:
    offsets = [offset for offset, _ in chunks]
    shape = Shape(group=group, kv_heads=1, head_dim=head_dim, block_size=block_size)
    case = PagedCase([offset + count for offset, count in chunks], shape, device=device, seed=seed)
    queries = [case.random(count, shape.query_heads) for _, count in chunks]
    for number, actual in enumerate(prefill(case, queries, offsets)):
        assert_close(actual, case.attend(number, queries[number], offsets[number]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "offset"), [(128, 0), (128, 130), (80, 130), (100, 0)])
def test_each_dtype_with_the_default_constants(
    device: torch.device, dtype: torch.dtype, head_dim: int, offset: int
) -> None:
    shape = Shape(group=16, kv_heads=2, head_dim=head_dim)
    case = PagedCase([offset + 20], shape, dtype=dtype, device=device)
    queries = case.random(20, 32)
    (actual,) = prefill(case, [queries], [offset], prefill_config(head_dim, dtype))
    assert_close(actual, case.attend(0, queries, offset))


@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 20)])
def test_slopes_make_scores_fall_with_the_distance(device: torch.device, group: int, head_dim: int) -> None:
    offsets, counts = [50, 0], [9, 20]
    lengths = [offset + count for offset, count in zip(offsets, counts, strict=True)]
    case = PagedCase(lengths, Shape(group=group, head_dim=head_dim), device=device)
    queries = [case.random(count, case.shape.query_heads) for count in counts]
    for number, actual in enumerate(prefill(case, queries, offsets, slopes=case.slopes())):
        assert_close(actual, case.attend(number, queries[number], offsets[number], case.slopes()))


def test_a_row_is_the_same_bits_whatever_is_beside_it(device: torch.device) -> None:
    case = PagedCase([40, 33, 9], Shape(), device=device)
    queries = [case.random(count, case.shape.query_heads) for count in (7, 33, 9)]
    offsets = [33, 0, 0]
    together = prefill(case, queries, offsets)
    alone = PagedCase([40, 33, 9], Shape(), device=device)
    alone.table_rows = alone.table_rows[1:2]
    assert torch.equal(prefill(alone, queries[1:2], offsets[1:2])[0], together[1])


def test_heads_beyond_the_rows_of_a_tile_get_a_larger_one(device: torch.device) -> None:
    case = PagedCase([20], Shape(group=20, kv_heads=1), device=device)
    queries = case.random(3, 20)
    (actual,) = prefill(case, [queries], [17])
    assert_close(actual, case.attend(0, queries, 17))


def test_rows_that_no_tile_names_are_left_alone(device: torch.device) -> None:
    case = PagedCase([9], Shape(), device=device)
    queries = case.random(9, case.shape.query_heads)
    tiles = torch.tensor([(case.table_rows[0], 2, 2, 3)], dtype=torch.int32, device=device)
    out = torch.full_like(queries, 7)
    prefill_attention(queries, case.keys, case.values, case.tables, tiles, out, config=SMALL)
    assert_close(out[2:5], case.attend(0, queries, 0)[2:5])
    assert (out[:2] == 7).all()
    assert (out[5:] == 7).all()


def test_tiles_cover_every_query_once_and_start_with_the_longest_past() -> None:
    chunks = [
        ChunkRows(slot=4, start=1, end=10, offset=0),
        ChunkRows(slot=2, start=10, end=15, offset=30),
    ]
    tiles = make_tiles(chunks, 4)
    assert tiles == [(2, 14, 34, 1), (2, 10, 30, 4), (4, 9, 8, 1), (4, 5, 4, 4), (4, 1, 0, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 100, 128, 256])
def test_tiles_are_what_a_dot_takes(head_dim: int, dtype: torch.dtype) -> None:
    config = prefill_config(head_dim, dtype)
    for each in (config.rows, config.keys):
        assert each >= 16
        assert each & (each - 1) == 0
