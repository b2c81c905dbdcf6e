from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from triton_models.engine.kernels.attention_decode import (
    PARTS,
    DecodePlan,
    DecodeWorkspace,
    NewTokens,
    decode_attention,
    plan_decode,
    share_out,
)
from triton_models.engine.kernels.elementwise import rotate_store
from triton_models.engine.kernels.heads import padded
from triton_models.engine.kernels.rows import BLOCK, SCALED_BLOCK, new_marks
from triton_models.engine.models import Rotary

SMALL = DecodePlan(tile=16, warps=4, stages=2, extra=1)
"""Divides no sequence."""
UNWRITTEN = 77.0
BY_LENGTH = None
"""Of `DecodePlan.extra`."""


def decode(
    case: PagedCase,
    queries: Tensor | NewTokens,
    extra: int | None,
    batch: list[int],
    *,
    parts: int = PARTS,
    backwards: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Return the attention of the chosen sequences' last tokens, checking that nothing stays behind.

    `backwards`: a sequence's last part comes first.
    """
    shape, plan = case.shape, replace(SMALL, extra=extra, parts=parts)
    workspace = DecodeWorkspace(
        rows=len(batch),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        device=case.device,
    )
    workspace.sums.fill_(torch.nan)
    workspace.scales.fill_(torch.nan)
    size = (len(batch), shape.query_heads, shape.head_dim)
    out = torch.full(size, UNWRITTEN, device=case.device).to(dtype or case.keys.dtype)
    rows = queries if isinstance(queries, NewTokens) else queries[batch]
    slots = case.integers([case.table_rows[each] for each in batch])
    lengths = case.integers([case.lengths[each] for each in batch])
    items = share_out(lengths, slots, plan)
    items = items.flip(0) if backwards else items
    decode_attention(
        rows, case.keys, case.values, case.tables, items, out,
        plan=plan, workspace=workspace, **options,
    )  # fmt: skip
    assert not workspace.arrivals.any()
    for row, *_, part, share in items.tolist():
        # Each head has a place of its own: on a GPU, programs of all heads run side by side.
        if row >= 0 and share * plan.tile < case.lengths[batch[row]]:
            assert workspace.scales[row, :, part, :, : shape.group].isfinite().all()
    return out


def expected(case: PagedCase, queries: Tensor) -> Tensor:
    return torch.cat(
        [case.attend(number, queries[number, None], length - 1) for number, length in enumerate(case.lengths)]
    )


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    extra=st.integers(1, 7) | st.just(BY_LENGTH),
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
    extra: int | None,
    group: int,
    head_dim: int,
    block_size: int,
    seed: int,
) -> None:
    shape = Shape(group=group, head_dim=head_dim, block_size=block_size)
    case = PagedCase(lengths, shape, device=device, seed=seed)
    queries = case.random(len(lengths), case.shape.query_heads)
    actual = decode(case, queries, extra, list(range(len(lengths))))
    assert_close(actual, expected(case, queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "extra"), [(128, 1), (128, 4), (80, 4), (100, BY_LENGTH)])
def test_each_dtype_with_the_default_constants(
    device: torch.device, dtype: torch.dtype, head_dim: int, extra: int | None
) -> None:
    shape = Shape(group=16, kv_heads=1, head_dim=head_dim)
    case = PagedCase([259, 16], shape, dtype=dtype, device=device)
    queries = case.random(2, 16)
    workspace = DecodeWorkspace(rows=2, query_heads=16, kv_heads=1, head_dim=head_dim, device=device)
    out = torch.full_like(queries, torch.nan)
    plan = replace(plan_decode(1, head_dim, dtype, sm_count=1), extra=extra)
    items = share_out(case.integers(case.lengths), case.integers(case.table_rows), plan)
    decode_attention(queries, case.keys, case.values, case.tables, items, out, plan=plan, workspace=workspace)
    assert_close(out, expected(case, queries))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 16 * PARTS, 16 * PARTS + 1])
def test_however_a_row_is_divided_it_comes_to_the_same(device: torch.device, length: int) -> None:
    case = PagedCase([40, length, 5], Shape(kv_heads=1), device=device)
    queries = case.random(3, case.shape.query_heads)
    for extra in (1, 2, 5, PARTS, PARTS + 8):
        assert_close(decode(case, queries, extra, [1]), expected(case, queries)[1:2])


@pytest.mark.parametrize(("length", "parts"), [(1, 32), (128, 32), (129, 32), (33 * 16, 32), (33 * 16, 3)])
def test_a_row_whose_length_decides_is_the_same_bits_in_any_batch(
    device: torch.device, length: int, parts: int
) -> None:
    case = PagedCase([40, length, 300], Shape(kv_heads=1), device=device)
    queries = case.random(3, case.shape.query_heads)
    alone = decode(case, queries, BY_LENGTH, [1], parts=parts)
    assert_close(alone, expected(case, queries)[1:2])
    assert torch.equal(decode(case, queries, BY_LENGTH, [2, 1, 0], parts=parts)[1:2], alone)
    assert torch.equal(decode(case, queries, BY_LENGTH, [0, 2, 2, 1], parts=parts)[3:], alone)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 20)])
def test_slopes_make_scores_fall_with_the_distance(device: torch.device, group: int, head_dim: int) -> None:
    case = PagedCase([70, 5], Shape(group=group, head_dim=head_dim), device=device)
    queries, slopes = case.random(2, case.shape.query_heads), case.slopes()
    whole, parts = (decode(case, queries, extra, [0, 1], slopes=slopes) for extra in (1, 3))
    for number, length in enumerate(case.lengths):
        wanted = case.attend(number, queries[number, None], length - 1, slopes)
        assert_close(whole[number, None], wanted)
        assert_close(parts[number, None], wanted)


def new_tokens(case: PagedCase, pairs: int | None) -> NewTokens:
    """Return a new token for each sequence, and tables for all positions; None: nothing is rotated."""
    shape = case.shape
    projected = case.random(len(case.lengths), shape.query_heads + 2 * shape.kv_heads)
    if pairs is None:
        return NewTokens(projected, None)
    positions = max(case.lengths)
    angles = torch.arange(positions * pairs, device=case.device).view(positions, pairs) * 0.7
    return NewTokens(projected, Rotary(angles.cos(), angles.sin()))


def bits(cached: Tensor) -> Tensor:
    """Return what tells whether anything was written where there is no number."""
    return cached.view(torch.int32 if cached.dtype == torch.float32 else torch.int16)


def stored_before(
    case: PagedCase, new: NewTokens, extra: int | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention to new tokens that `rotate_store` has stored, and the cache, as bits.

    The cache of the case stays as it is.
    """
    kept, shape, rotary = (case.keys, case.values), case.shape, new.rotary
    case.keys, case.values = (each.clone() for each in kept)
    heads = new.projected.clone()
    positions = case.integers([length - 1 for length in case.lengths])
    rotate_store(
        heads, rotary and rotary.cos, rotary and rotary.sin,
        positions, case.tables, case.integers(case.table_rows),
        case.keys, case.values, query_heads=shape.query_heads,
    )  # fmt: skip
    attended = decode(case, heads[:, : shape.query_heads], extra, list(range(len(case.lengths))), **options)
    stored = bits(case.keys), bits(case.values)
    case.keys, case.values = kept
    return attended, *stored


NEW_TOKENS = {
    "whole": (Shape(), 8, False),
    "partial": (Shape(group=1), 3, False),
    "padded": (Shape(group=2, head_dim=20), 5, False),
    "blocks": (Shape(kv_heads=1, head_dim=20, block_size=64), 10, False),
    "no pairs": (Shape(group=17, kv_heads=1, block_size=64), 0, False),
    "unrotated": (Shape(group=1), None, False),
    "leaning": (Shape(group=1, kv_heads=3, head_dim=20), None, True),
}


@pytest.mark.parametrize(
    ("shape", "pairs", "leaning", "dtype", "extra"),
    [
        # Each shape with each dtype and each share of programs, each dtype with each share.
        pytest.param(*NEW_TOKENS[name], dtype, (1, 4, BY_LENGTH)[(place + turn) % 3], id=f"{name}-{dtype}")
        for turn, name in enumerate(NEW_TOKENS)
        for place, dtype in enumerate([torch.float32, torch.float16, torch.bfloat16])
    ],
)
def test_new_tokens_are_rotated_and_stored_to_the_same_bits(
    device: torch.device,
    dtype: torch.dtype,
    extra: int | None,
    shape: Shape,
    pairs: int | None,
    *,
    leaning: bool,
) -> None:
    lengths = [1, 16, 17, 64, 65, 130]
    case = PagedCase(lengths, shape, dtype=dtype, device=device)
    new = new_tokens(case, pairs)
    options = {"slopes": case.slopes()} if leaning else {}
    expected, keys, values = stored_before(case, new, extra, **options)
    assert not torch.equal(bits(case.keys), keys)
    projected = new.projected.clone()
    # No program may need another for what it stores, in whatever order they run.
    attended = decode(case, new, extra, list(range(len(lengths))), backwards=True, **options)
    assert attended.isfinite().all()
    assert torch.equal(attended, expected)
    assert torch.equal(bits(case.keys), keys)
    assert torch.equal(bits(case.values), values)
    assert torch.equal(new.projected, projected)


def test_what_is_not_rotated_never_meets_a_zero_sine(device: torch.device) -> None:
    case = PagedCase([20], Shape(), device=device)
    new = new_tokens(case, 4)
    new.projected[0, 6, 8] = torch.inf
    decode(case, new, 1, [0])
    block = case.tables[case.table_rows[0], 1]
    assert case.keys[block, 3, 0, 8] == torch.inf
    assert not case.keys[block, 3].isnan().any()


@pytest.mark.parametrize("extra", [1, 3])
def test_a_new_token_of_padding_is_not_stored(device: torch.device, extra: int) -> None:
    case = PagedCase([50, 33], Shape(), device=device)
    new = new_tokens(case, 4)
    case.lengths[1] = 0
    expected, keys, values = stored_before(case, new, extra)
    attended = decode(case, new, extra, [0, 1])
    assert torch.equal(attended, expected)
    assert torch.equal(attended[1], torch.full_like(attended[1], UNWRITTEN))
    assert torch.equal(bits(case.keys), keys)
    assert torch.equal(bits(case.values), values)


@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize(("eight_bits", "head_dim"), [(True, 128), (True, 256), (False, 64), (False, 128)])
def test_the_result_may_be_what_a_product_takes(
    device: torch.device, extra: int, *, eight_bits: bool, head_dim: int
) -> None:
    """Rounded to 8 bits with a scale for 128 numbers each, or with the sums of 64 each."""
    case = PagedCase([70, 5], Shape(group=3, head_dim=head_dim), dtype=torch.bfloat16, device=device)
    queries = case.random(2, case.shape.query_heads)
    width, block = case.shape.query_heads * head_dim, SCALED_BLOCK if eight_bits else BLOCK
    marks = new_marks(width, block, device).fill_(UNWRITTEN)
    dtype = torch.float8_e4m3fn if eight_bits else torch.bfloat16
    plain = decode(case, queries, extra, [0, 1])
    out = decode(case, queries, extra, [0, 1], dtype=dtype, marks=marks)
    numbers = out.double().view(2, -1, block)
    found = marks.T[:2].double()
    if eight_bits:
        assert (numbers.abs().amax(dim=2) == 448).all()
        numbers *= found[:, :, None]
        assert (numbers.view(plain.shape) - plain).norm() < 0.04 * plain.double().norm()
    else:
        assert torch.equal(out, plain)
        torch.testing.assert_close(found, numbers.sum(dim=2), atol=1e-4, rtol=1e-4)
    assert (marks[:, 2:] == UNWRITTEN).all()


def test_a_view_into_the_projection_is_read_in_place(device: torch.device) -> None:
    case = PagedCase([20, 30], Shape(), device=device)
    projected = case.random(2, case.shape.query_heads + 2 * case.shape.kv_heads)
    out = torch.empty(2, case.shape.query_heads, case.shape.head_dim, device=device)
    queries = projected[:, : case.shape.query_heads]
    items = share_out(case.integers(case.lengths), case.integers(case.table_rows), SMALL)
    workspace = DecodeWorkspace(rows=2, query_heads=6, kv_heads=2, head_dim=16, device=device)
    decode_attention(
        queries, case.keys, case.values, case.tables, items, out, plan=SMALL, workspace=workspace
    )
    assert_close(out, expected(case, queries))


@pytest.mark.parametrize("extra", [1, 3])
def test_padding_is_not_written_and_costs_its_neighbours_nothing(device: torch.device, extra: int) -> None:
    case = PagedCase([50], Shape(), device=device)
    queries = case.random(2, case.shape.query_heads)
    case.lengths.append(0)
    case.table_rows.append(case.table_rows[0])
    queries[1] = torch.nan
    actual = decode(case, queries, extra, [0, 1])
    assert_close(actual[:1], case.attend(0, queries[:1], 49))
    assert torch.equal(actual[1], torch.full_like(actual[1], UNWRITTEN))


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


def test_the_workspace_must_be_large_enough(device: torch.device) -> None:
    case = PagedCase([5, 5], Shape(), device=device)
    queries = case.random(2, case.shape.query_heads)
    items = share_out(case.integers([5, 5]), case.integers([0, 0]), SMALL)
    workspace = DecodeWorkspace(rows=1, query_heads=6, kv_heads=2, head_dim=16, device=device)
    with pytest.raises(ValueError, match="workspace"):
        decode_attention(
            queries, case.keys, case.values, case.tables, items, queries, plan=SMALL, workspace=workspace
        )


def _threes(size: tuple[int, ...], **options: Any) -> Tensor:
    return torch.full(size, 3, **options)


def shared_out(
    lengths: list[int], extra: int | None, device: torch.device, *, most: int = PARTS
) -> tuple[dict[int, list[int]], list[int]]:
    """Return the tiles of each part of each row that has any, and of all programs in their order.

    Checks that these are all of the rows' tiles.
    """
    plan = replace(SMALL, extra=extra, parts=most)
    numbers = torch.tensor(lengths, dtype=torch.int32, device=device)
    slots = torch.arange(100, 100 + len(lengths), dtype=torch.int32, device=device)
    # What was there before is no work.
    with patch("torch.empty", _threes):
        items = share_out(numbers, slots, plan).tolist()
    assert len(items) == plan.programs(len(lengths))
    parts: dict[int, list[int]] = {}
    order = []
    for row, slot, length, part, share in items:
        if row == -1:
            continue
        assert (slot, length) == (100 + row, lengths[row])
        tiles = -(-length // plan.tile)
        assert part == len(parts.setdefault(row, []))
        parts[row].append(min(share, tiles - part * share))
        order.append(parts[row][-1])
    assert {row: sum(each) for row, each in parts.items()} == {
        row: -(-length // plan.tile) for row, length in enumerate(lengths) if length
    }
    assert all(each > 0 for each in order)
    assert all(len(each) <= most for each in parts.values())
    return parts, order


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=9),
    extra=st.integers(1, 40) | st.just(BY_LENGTH),
)
@hypothesis_settings(max_examples=60)
def test_every_tile_is_somebodys_and_no_program_is_missing(
    *, device: torch.device, lengths: list[int], extra: int | None
) -> None:
    shared_out(lengths, extra, device)


def test_sequences_are_divided_until_all_programs_have_something_to_do(device: torch.device) -> None:
    assert shared_out([16 * 8], 8, device)[0] == {0: [1] * 8}
    assert shared_out([16 * 8] * 2, 8, device)[0] == {0: [2] * 4, 1: [2] * 4}
    # Only what is longer than the others.
    assert shared_out([16, 32, 0, 16 * 29], 8, device)[0] == {0: [1], 1: [2], 3: [4] * 7 + [1]}
    assert shared_out([16, 32, 0, 16 * 29], 1, device)[0] == {0: [1], 1: [2], 3: [29]}
    # The workspace has room for so many parts.
    assert shared_out([16 * 65], 64, device)[0] == {0: [3] * 21 + [2]}


def test_a_length_alone_may_decide(device: torch.device) -> None:
    parts, _ = shared_out([16 * 4, 16 * 9, 0, 16 * 256, 16 * 257], BY_LENGTH, device)
    assert parts == {0: [4], 1: [8, 1], 3: [8] * 32, 4: [9] * 28 + [5]}
    parts, _ = shared_out([16 * 4, 16 * 9, 16 * 256], BY_LENGTH, device, most=2)
    assert parts == {0: [4], 1: [8, 1], 2: [128, 128]}


def test_programs_with_most_to_do_come_first(device: torch.device) -> None:
    lengths = [16, 0, 16 * 5, 16 * 8, 16 * 2, 16 * 30, 16 * 7]
    parts, order = shared_out(lengths, 7, device)
    # By quarters of the largest; those of a row stay beside each other, the smaller last one with them.
    assert parts[5] == [8, 8, 8, 6]
    assert order == [8, 8, 8, 8, 6, 7, 5, 1, 2]


def test_more_rows_than_the_kernel_has_at_least(device: torch.device) -> None:
    lengths = [(7 * row) % 90 for row in range(300)]
    parts, _ = shared_out(lengths, 280, device)
    assert sum(map(len, parts.values())) > sum(length > 0 for length in lengths)


@pytest.mark.parametrize("extra", [BY_LENGTH, 600])
def test_most_of_a_captured_step_may_be_padding(device: torch.device, extra: int | None) -> None:
    assert shared_out([5] + [0] * 299, extra, device)[0] == {0: [1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 100, 128, 256, 1024])
def test_tiles_are_what_a_dot_takes(head_dim: int, dtype: torch.dtype) -> None:
    tile = plan_decode(2, head_dim, dtype, sm_count=132).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0


def test_long_sequences_are_divided_among_two_programs_for_each_multiprocessor() -> None:
    assert plan_decode(2, 128, torch.bfloat16, sm_count=132).extra == 132
    assert plan_decode(32, 128, torch.bfloat16, sm_count=132).extra == 8
    assert plan_decode(32, 128, torch.bfloat16, sm_count=1).extra == 1


def test_in_float32_rounding_does_not_depend_on_the_batch() -> None:
    plan = plan_decode(2, 128, torch.float32, sm_count=132)
    assert (plan.extra, plan.parts, plan.programs(512)) == (BY_LENGTH, 32, 512 * 32)
    # Many KV heads are many programs as it is.
    assert [plan_decode(heads, 128, torch.float32, sm_count=132).parts for heads in (1, 8, 32, 96)] == [
        32, 8, 2, 1,
    ]  # fmt: skip


def test_query_heads_are_filled_up_to_what_a_dot_takes() -> None:
    assert [padded(heads) for heads in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_the_workspace_has_no_room_for_heads_that_only_fill_a_tile() -> None:
    workspace = DecodeWorkspace(rows=2, query_heads=4, kv_heads=4, head_dim=80, device=torch.device("cpu"))
    assert workspace.sums.shape == (2, 4, PARTS, 1, 128)


def test_a_reset_workspace_forgets_a_launch_that_failed_midway() -> None:
    workspace = DecodeWorkspace(rows=2, query_heads=6, kv_heads=2, head_dim=16, device=torch.device("cpu"))
    workspace.arrivals[1, 0] = 3
    workspace.reset()
    assert not workspace.arrivals.any()
