from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from tests.triton_models.engine.wild_mix import LARGE_STEP
from triton_models.engine.graphs import prompt_sizes
from triton_models.engine.kernels.attention_prefill import (
    FEW_ROWS,
    MANY_ROWS,
    PrefillConfig,
    PrefillWorkspace,
    make_tiles,
    prefill_attention,
    prefill_config,
    prefill_workspace,
    queries_per_tile,
)
from triton_models.engine.models import ChunkRows, Tile
from triton_models.engine.ops_hopper import FEW_HOPPER_ROWS, HOPPER_ROWS

SMALL = PrefillConfig(rows=16, keys=16, warps=4, stages=2)


def prefill(
    case: PagedCase,
    queries: list[Tensor],
    offsets: list[int],
    config: PrefillConfig = SMALL,
    slopes: Tensor | None = None,
    *,
    programs: int = 0,
) -> list[Tensor]:
    """Attend every sequence's queries in one launch, rows of the step in the sequences' order.

    `programs`: among which keys are divided.
    """
    chunks, start = [], 0
    for row, part, offset in zip(case.table_rows, queries, offsets, strict=True):
        chunks.append(ChunkRows(row, start, start + len(part), offset))
        start += len(part)
    shape = case.shape
    tile = queries_per_tile(shape.query_heads, shape.kv_heads, config.rows)
    divided = make_tiles(chunks, tile, keys=config.keys, programs=programs)
    tiles = torch.tensor(divided, dtype=torch.int32, device=case.device)
    workspace = None
    if programs:
        workspace = PrefillWorkspace(
            places=programs,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rows=config.rows,
            device=case.device,
        )
        for left in (workspace.sums, workspace.scales):
            left.fill_(torch.nan)
    # As the engine has them: the first heads of a wider product.
    projected = torch.cat(queries).repeat(1, 2, 1)
    out = torch.full((start, shape.query_heads, shape.head_dim), torch.nan).to(projected)
    prefill_attention(
        projected[:, : shape.query_heads], case.keys, case.values, case.tables, tiles, out,
        config=config, slopes=slopes, workspace=workspace,
    )  # fmt: skip
    assert workspace is None or not workspace.arrivals.any()
    return list(torch.split(out, [len(part) for part in queries]))


@given(
    chunks=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 25)), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4, 16]),
    head_dim=st.sampled_from([16, 20]),
    block_size=st.sampled_from([16, 32]),
    in_blocks=st.booleans(),
    programs=st.sampled_from([0, 1, 4, 99]),
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
    in_blocks: bool,
    programs: int,
    seed: int,
) -> None:
    """However keys are divided, also among more programs than there are keys for."""
    offsets = [offset for offset, _ in chunks]
    shape = Shape(group=group, kv_heads=1, head_dim=head_dim, block_size=block_size)
    case = PagedCase([offset + count for offset, count in chunks], shape, device=device, seed=seed)
    queries = [case.random(count, shape.query_heads) for _, count in chunks]
    config = replace(SMALL, in_blocks=in_blocks)
    for number, actual in enumerate(prefill(case, queries, offsets, config, programs=programs)):
        assert_close(actual, case.attend(number, queries[number], offsets[number]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [128, 80])
@pytest.mark.parametrize("slopes", [False, True])
def test_whole_blocks_give_the_same_bits(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, slopes: bool
) -> None:
    """In large steps as in small ones, behind a block that is full, one that is not, and no other token."""
    shape = Shape(group=4, head_dim=head_dim, block_size=64)
    offsets, counts = [64, 130, 0], [9, 40, 70]
    lengths = [offset + count for offset, count in zip(offsets, counts, strict=True)]
    case = PagedCase(lengths, shape, dtype=dtype, device=device)
    queries = [case.random(count, shape.query_heads) for count in counts]
    leaning = (case.slopes(),) if slopes else ()
    chosen = [
        prefill_config(head_dim, dtype, block_size=size, rows=rows)
        for size, rows in ((16, 2048), (64, MANY_ROWS), (64, MANY_ROWS + 1))
    ]
    assert [(each.in_blocks, each.rows) for each in chosen] == [(False, 64), (True, 64), (True, 128)]
    by_token, by_block, large = (prefill(case, queries, offsets, config, *leaning) for config in chosen)
    for number, expected in enumerate(by_token):
        assert torch.equal(by_block[number], expected)
        # The interpreter's products are those of a library, whose sums depend on the number of rows.
        assert torch.equal(large[number], expected) or device.type == "cpu"
        assert_close(large[number], case.attend(number, queries[number], offsets[number], *leaning))


def test_tiles_that_blocks_cannot_hold_are_refused(device: torch.device) -> None:
    case = PagedCase([9], Shape(block_size=16), device=device)
    queries = [case.random(9, case.shape.query_heads)]
    with pytest.raises(ValueError, match="32 keys do not divide a block of 16"):
        prefill(case, queries, [0], replace(SMALL, keys=32, in_blocks=True))


def test_what_cannot_be_copied_in_blocks_is_not() -> None:
    """Blocks of fewer keys, strides of no 16 bytes; heads too large for registers have small tiles."""
    half = partial(prefill_config, dtype=torch.bfloat16, rows=2048)
    assert not half(128, block_size=16).in_blocks
    assert not half(100, block_size=64).in_blocks
    assert (half(256, block_size=128).in_blocks, half(256, block_size=128).rows) == (True, 64)
    assert half(128, block_size=64).rows == 128
    assert not prefill_config(128, torch.float32, block_size=64, rows=2048).in_blocks


@pytest.mark.parametrize("most", [MANY_ROWS, FEW_ROWS, HOPPER_ROWS, FEW_HOPPER_ROWS])
@pytest.mark.parametrize("largest", [300, 992, 1000, 2048, 8192])
def test_padding_does_not_make_a_step_a_large_one(largest: int, most: int) -> None:
    """The tiles of its own rows would not be those of the captured step."""
    assert MANY_ROWS == LARGE_STEP
    sizes = prompt_sizes(largest)
    for rows in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= rows)
        assert (rows > most) == (padded > most)


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


@pytest.mark.parametrize("programs", [0, 9])
def test_heads_beyond_the_rows_of_a_tile_get_a_larger_one(device: torch.device, programs: int) -> None:
    case = PagedCase([320], Shape(group=20, kv_heads=2), device=device)
    queries = case.random(3, 40)
    (actual,) = prefill(case, [queries], [317], programs=programs)
    assert_close(actual, case.attend(0, queries, 317))


def test_rows_that_no_tile_names_are_left_alone(device: torch.device) -> None:
    case = PagedCase([9], Shape(), device=device)
    queries = case.random(9, case.shape.query_heads)
    tiles = torch.tensor([Tile(case.table_rows[0], 2, 2, 3)], dtype=torch.int32, device=device)
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
    expected = [(2, 14, 34, 1), (2, 10, 30, 4), (4, 9, 8, 1), (4, 5, 4, 4), (4, 1, 0, 4)]
    assert tiles == [Tile(*each, parts=1) for each in expected]


def test_keys_of_few_tokens_are_divided_evenly_and_those_of_many_not_at_all() -> None:
    few = make_tiles([ChunkRows(slot=1, start=0, end=6, offset=10_000)], 4, keys=64, programs=12)
    assert [(each.tokens, each.part, each.parts) for each in few[:6]] == [(4, part, 6) for part in range(6)]
    assert {each.place for each in few} == {0, 6}
    assert len(few) == 12
    many = make_tiles([ChunkRows(slot=1, start=0, end=900, offset=10_000)], 4, keys=64, programs=132)
    assert {each.parts for each in many} == {1}
    by_turns = partial(make_tiles, tile=8, keys=128, programs=66, rounds=4)
    for tokens, parts in ((140, 3), (256, 2), (300, 3), (700, 2), (1024, 1), (2048, 1)):
        made = by_turns([ChunkRows(slot=1, start=0, end=tokens, offset=8_000)])
        assert {each.parts for each in made} == {parts}, tokens
    short = make_tiles([ChunkRows(slot=1, start=0, end=6, offset=500)], 4, keys=64, programs=132)
    assert {each.parts for each in short} == {1}


@given(
    chunks=st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 90)), min_size=1, max_size=12),
    programs=st.integers(1, 200),
    rounds=st.integers(1, 4),
    tile=st.sampled_from([1, 4, 64]),
)
def test_parts_have_places_of_their_own_and_none_is_empty(
    *, chunks: list[tuple[int, int]], programs: int, rounds: int, tile: int
) -> None:
    rows, step = 0, []
    for slot, (offset, count) in enumerate(chunks):
        step.append(ChunkRows(slot, rows, rows + count, offset))
        rows += count
    tiles = make_tiles(step, tile, keys=64, programs=programs, rounds=rounds)
    places = [each.place + each.part for each in tiles if each.parts > 1]
    assert sorted(places) == [*range(len(places))]
    assert len(places) <= programs * rounds
    by_tile: dict[int, list[int]] = {}
    for each in tiles:
        loads = -(-(each.position + each.tokens) // 64)
        first, last = (loads * part // each.parts for part in (each.part, each.part + 1))
        # What the kernel relies on: the first token of a tile sees a key of every part.
        assert first < last
        assert first * 64 <= each.position
        by_tile.setdefault(each.row, []).append(each.part)
        assert each.parts <= 64
    assert all(sorted(parts) == [*range(len(parts))] for parts in by_tile.values())
    assert len(by_tile) == len(make_tiles(step, tile))


def test_only_16_bits_and_small_steps_have_parts() -> None:
    """In float32 a row is the same bits in any batch."""
    device = torch.device("cpu")
    divided = prefill_workspace(32, 2, 128, torch.bfloat16, sm_count=132, device=device)
    assert divided is not None
    assert divided.places == 132
    assert divided.sums.shape[2] == prefill_config(128, torch.bfloat16, block_size=64, rows=MANY_ROWS).rows
    assert prefill_workspace(32, 2, 128, torch.float32, sm_count=132, device=device) is None


def test_a_workspace_is_usable_again_after_a_failed_launch() -> None:
    workspace = PrefillWorkspace(
        places=4, query_heads=6, kv_heads=2, head_dim=16, rows=16, device=torch.device("cpu")
    )
    workspace.arrivals[1, 0, 1] = 3
    workspace.reset()
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 100, 128, 256])
def test_tiles_are_what_a_dot_takes(head_dim: int, dtype: torch.dtype) -> None:
    config = prefill_config(head_dim, dtype)
    for each in (config.rows, config.keys):
        assert each >= 16
        assert each & (each - 1) == 0
