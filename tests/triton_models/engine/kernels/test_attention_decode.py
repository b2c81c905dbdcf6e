from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from triton_models.engine.kernels.attention_decode import (
    SEGMENTS,
    DecodeConfig,
    DecodeWorkspace,
    choose_splits,
    decode_attention,
    decode_config,
    plan_decode,
)
from triton_models.engine.kernels.heads import padded

SMALL = DecodeConfig(tile=16, warps=4, stages=2)


def decode(
    case: PagedCase,
    queries: Tensor,
    splits: int,
    batch: list[int],
    config: DecodeConfig = SMALL,
    **options: object,
) -> Tensor:
    """Return the attention of the chosen sequences' last tokens, checking that nothing stays behind."""
    shape = case.shape
    workspace = DecodeWorkspace(
        rows=len(batch),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        device=case.device,
    )
    workspace.sums.fill_(torch.nan)
    workspace.scales.fill_(torch.nan)
    out = torch.full((len(batch), shape.query_heads, shape.head_dim), torch.nan).to(queries)
    rows = case.integers([case.table_rows[each] for each in batch])
    lengths = case.integers([case.lengths[each] for each in batch])
    decode_attention(
        queries[batch], case.keys, case.values, case.tables, rows, lengths, out,
        splits=splits, workspace=workspace, config=config, **options,
    )  # fmt: skip
    assert not workspace.arrivals.any()
    return out


def expected(case: PagedCase, queries: Tensor) -> Tensor:
    return torch.cat(
        [case.attend(number, queries[number, None], length - 1) for number, length in enumerate(case.lengths)]
    )


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    splits=st.integers(1, 7),
    group=st.sampled_from([1, 3, 4, 16]),
    head_dim=st.sampled_from([16, 20]),
    block_size=st.sampled_from([16, 64]),
    seed=st.integers(0, 1000),
)
@hypothesis_settings(max_examples=25)
def test_equals_direct_attention(
    *,
    device: torch.device,
    lengths: list[int],
    splits: int,
    group: int,
    head_dim: int,
    block_size: int,
    seed: int,
) -> None:
    shape = Shape(group=group, head_dim=head_dim, block_size=block_size)
    case = PagedCase(lengths, shape, device=device, seed=seed)
    queries = case.random(len(lengths), case.shape.query_heads)
    actual = decode(case, queries, splits, list(range(len(lengths))))
    assert_close(actual, expected(case, queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "splits"), [(128, 1), (128, 3), (80, 3), (100, 1)])
def test_each_dtype_with_the_default_constants(
    device: torch.device, dtype: torch.dtype, head_dim: int, splits: int
) -> None:
    shape = Shape(group=16, kv_heads=1, head_dim=head_dim)
    case = PagedCase([259, 16], shape, dtype=dtype, device=device)
    queries = case.random(2, 16)
    workspace = DecodeWorkspace(rows=2, query_heads=16, kv_heads=1, head_dim=head_dim, device=device)
    out = torch.full_like(queries, torch.nan)
    decode_attention(
        queries, case.keys, case.values, case.tables, case.integers(case.table_rows),
        case.integers(case.lengths), out, splits=splits, workspace=workspace,
    )  # fmt: skip
    assert_close(out, expected(case, queries))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 16 * SEGMENTS, 16 * SEGMENTS + 1])
def test_a_row_is_the_same_bits_however_it_is_split_and_whatever_is_beside_it(
    device: torch.device, length: int
) -> None:
    case = PagedCase([40, length, 5], Shape(kv_heads=1), device=device)
    queries = case.random(3, case.shape.query_heads)
    alone = decode(case, queries, 1, [1])
    assert_close(alone, expected(case, queries)[1:2])
    for splits in (2, 5, SEGMENTS, SEGMENTS + 8):
        for least in (1, 3):
            config = replace(SMALL, least=least)
            assert torch.equal(decode(case, queries, splits, [1], config=config), alone)
    assert torch.equal(decode(case, queries, 3, [2, 1, 0])[1:2], alone)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 20)])
def test_slopes_make_scores_fall_with_the_distance(device: torch.device, group: int, head_dim: int) -> None:
    case = PagedCase([70, 5], Shape(group=group, head_dim=head_dim), device=device)
    queries, slopes = case.random(2, case.shape.query_heads), case.slopes()
    whole = decode(case, queries, 1, [0, 1], slopes=slopes)
    for number, length in enumerate(case.lengths):
        wanted = case.attend(number, queries[number, None], length - 1, slopes)
        assert_close(whole[number, None], wanted)
    assert torch.equal(decode(case, queries, 3, [0, 1], slopes=slopes), whole)


def test_a_view_into_the_projection_is_read_in_place(device: torch.device) -> None:
    case = PagedCase([20, 30], Shape(), device=device)
    projected = case.random(2, case.shape.query_heads + 2 * case.shape.kv_heads)
    out = torch.empty(2, case.shape.query_heads, case.shape.head_dim, device=device)
    queries = projected[:, : case.shape.query_heads]
    decode_attention(
        queries, case.keys, case.values, case.tables, case.integers(case.table_rows),
        case.integers(case.lengths), out, splits=1, config=SMALL,
    )  # fmt: skip
    assert_close(out, expected(case, queries))


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_is_zero_and_costs_its_neighbours_nothing(device: torch.device, splits: int) -> None:
    case = PagedCase([50], Shape(), device=device)
    queries = case.random(2, case.shape.query_heads)
    case.lengths.append(0)
    case.table_rows.append(case.table_rows[0])
    queries[1] = torch.nan
    actual = decode(case, queries, splits, [0, 1])
    assert_close(actual[:1], case.attend(0, queries[:1], 49))
    assert torch.equal(actual[1], torch.zeros_like(actual[1]))


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_a_bad_row_spoils_only_itself(device: torch.device) -> None:
    case = PagedCase([50, 50], Shape(), device=device)
    queries = case.random(2, case.shape.query_heads)
    healthy = decode(case, queries, 2, [0, 1])[1]
    queries[0, 1, 3] = torch.nan
    actual = decode(case, queries, 2, [0, 1])
    assert actual[0, 1].isnan().all()
    assert actual[0, 0].isfinite().all()
    assert torch.equal(actual[1], healthy)


def test_splitting_needs_a_workspace_that_is_large_enough(device: torch.device) -> None:
    case = PagedCase([5, 5], Shape(), device=device)
    queries = case.random(2, case.shape.query_heads)
    numbers = case.integers([0, 0])
    workspace = DecodeWorkspace(rows=1, query_heads=6, kv_heads=2, head_dim=16, device=device)
    for each in (None, workspace):
        with pytest.raises(ValueError, match="workspace"):
            decode_attention(
                queries, case.keys, case.values, case.tables, numbers, numbers, queries,
                splits=2, workspace=each,
            )  # fmt: skip


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_splits(1, 2, 132, 8192) == SEGMENTS
    assert choose_splits(1, 2, 132, 259) == 3
    assert choose_splits(32, 2, 132, 8192) == 2
    assert choose_splits(512, 2, 132, 8192) == 1


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 100, 128, 256, 1024])
def test_tiles_are_what_a_dot_takes(head_dim: int, dtype: torch.dtype, crowded: bool) -> None:
    tile = decode_config(head_dim, dtype, crowded=crowded).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0


def plan(
    batch: int, *, dtype: torch.dtype = torch.bfloat16, beside_prompts: bool = False
) -> tuple[int, DecodeConfig]:
    """Return the plan for ChatGLM3-6B's heads on an H200."""
    return plan_decode(batch, 2, 128, dtype, sm_count=132, max_length=8192, beside_prompts=beside_prompts)


def test_more_programs_than_the_device_holds_get_smaller_tiles() -> None:
    assert plan(198)[1].tile == 128
    assert plan(199)[1].tile == 64
    assert plan(199)[0] == 1


def test_prompts_in_the_step_leave_room_for_a_few_long_decodes() -> None:
    splits, config = plan(512, beside_prompts=True)
    assert splits == 4
    assert replace(config, least=1) == plan(1)[1]


@pytest.mark.parametrize(
    ("length", "programs"), [(1, 1), (512, 1), (513, 2), (1024, 2), (2048, 4), (8192, 4)]
)
def test_prompts_in_the_step_have_no_short_decode_divided(length: int, programs: int) -> None:
    splits, config = plan(512, beside_prompts=True)
    tiles = -(-length // config.tile)
    segment_tiles = -(-tiles // SEGMENTS)
    segments = -(-tiles // segment_tiles)
    share = max(-(-segments // splits), -(-config.least // segment_tiles))
    assert -(-segments // share) == programs


def test_in_float32_rounding_does_not_depend_on_the_batch() -> None:
    assert plan(512, dtype=torch.float32)[1] == plan(1, dtype=torch.float32)[1]


def test_query_heads_are_filled_up_to_what_a_dot_takes() -> None:
    assert [padded(heads) for heads in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_the_workspace_has_no_room_for_heads_that_only_fill_a_tile() -> None:
    workspace = DecodeWorkspace(rows=2, query_heads=4, kv_heads=4, head_dim=80, device=torch.device("cpu"))
    assert workspace.sums.shape == (2, 4, SEGMENTS, 1, 128)


def test_a_reset_workspace_forgets_a_launch_that_failed_midway() -> None:
    workspace = DecodeWorkspace(rows=2, query_heads=6, kv_heads=2, head_dim=16, device=torch.device("cpu"))
    workspace.arrivals[1, 0] = 3
    workspace.reset()
    assert not workspace.arrivals.any()
