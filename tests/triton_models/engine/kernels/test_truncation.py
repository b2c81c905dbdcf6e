import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton_models.engine.kernels.rows import Row, chosen, drawn, kept, plainly
from triton_models.engine.kernels import sampling, truncation
from triton_models.engine.kernels.truncation import (
    GROUPS,
    collect,
    group_peaks,
    kth_largest,
    order,
    search,
    value_of,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARY = 600


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows of few tokens into blocks as rows of many are."""
    monkeypatch.setattr(sampling, "_BLOCK", 256)
    monkeypatch.setattr(truncation, "_BLOCK", 256)


def random(rows: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((rows, VOCABULARY), generator=generator) * 3).to(device, dtype)


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    return [drawn(values, row) for values, row in zip(logits.double().tolist(), rows, strict=True)]


LIMITS = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 127},
    {"top_k": 400},
    {"top_k": 10_000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.8},
    {"top_p": 0.999999},
    {"min_p": 0.2},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99},
    {"top_k": 40, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.3, "min_p": 1e-3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.7, "min_p": 1e-6},
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_what_the_definitions_say(dtype: torch.dtype, device: torch.device) -> None:
    rows = [
        Row(temperature=0.8 if number % 2 else 2.5, seed=number, **limits)
        for number, limits in enumerate(LIMITS)
    ]
    logits = random(len(rows), dtype, device, seed=4)
    assert chosen(logits, rows)[0].tolist() == expected(logits, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_are_kept_in_order_of_id(dtype: torch.dtype, device: torch.device) -> None:
    """Halves of small integers: every threshold falls among many equals."""
    rows = [Row(temperature=1.5, seed=number, **limits) for number, limits in enumerate(LIMITS)]
    logits = (random(len(rows), torch.float32, device, seed=5) * 0.5).round().to(dtype) / 2
    assert chosen(logits, rows)[0].tolist() == expected(logits, rows)


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 7, "top_p": 0.4}])
def test_all_equal(limits: dict[str, float], device: torch.device) -> None:
    logits = torch.full((8, VOCABULARY), -0.0, device=device)
    logits[:, 1::2] = 0.0
    rows = [Row(temperature=1.0, seed=seed, **limits) for seed in range(8)]
    tokens = chosen(logits, rows)[0].tolist()
    assert tokens == expected(logits, rows)
    assert max(tokens) < len(kept(logits[0].tolist(), rows[0]))


def test_least_of_the_likeliest_may_be_zero(device: torch.device) -> None:
    logits = -random(8, torch.float32, device).abs()
    logits[:, 7::50] = 0.0
    logits[:, 9::50] = -0.0
    rows = [Row(temperature=1.0, seed=seed, min_p=1.0) for seed in range(8)]
    tokens = chosen(logits, rows)[0].tolist()
    assert tokens == expected(logits, rows)
    assert {token % 50 for token in tokens} <= {7, 9}


@pytest.mark.parametrize("limits", [{"top_k": 100}, {"top_p": 0.6}, {"top_k": 500, "top_p": 0.9}])
def test_more_equal_tokens_than_are_collected(limits: dict[str, float], device: torch.device) -> None:
    logits = random(8, torch.float32, device).clamp(max=0.5)
    logits[:, ::2] = 0.5  # 300 of 600, and 256 are collected at most
    logits[:, :9] = 1.0
    rows = [Row(temperature=1.0, seed=seed, **limits) for seed in range(8)]
    assert chosen(logits, rows)[0].tolist() == expected(logits, rows)


def test_agrees_with_the_plain_sampler_beside_rows_without_limits(device: torch.device) -> None:
    rows = [
        Row(temperature=1.0, seed=1),
        Row(temperature=1.0, seed=2, top_p=0.8),
        Row(top_k=5),
        Row(temperature=0.6, seed=3, top_k=50, top_p=0.9),
        Row(),
        Row(temperature=1.2, seed=4, top_k=9),
        Row(temperature=0.9, seed=5, min_p=0.02, top_p=0.95),
    ]
    logits = random(len(rows), torch.bfloat16, device, seed=6)
    assert torch.equal(chosen(logits, rows), plainly(logits, rows))


def test_row_depends_on_nothing_else(device: torch.device) -> None:
    rows = [Row(temperature=1.0, seed=seed, top_k=90, top_p=0.7) for seed in range(4)]
    logits = random(4, torch.float32, device)
    sound = chosen(logits, rows)[0].tolist()
    logits[1, 17] = math.nan

    status = chosen(logits, rows)

    assert status[1].tolist() == [1, 0, 1, 1]
    assert [status[0, row].item() for row in (0, 2, 3)] == [sound[row] for row in (0, 2, 3)]
    assert 0 <= status[0, 1] < VOCABULARY
    for number, row in enumerate(rows):
        alone = chosen(logits[number : number + 1].clone(), [row])
        assert alone[0, 0] == status[0, number]


@pytest.mark.parametrize("limits", [{"top_k": 50}, {"top_k": 200}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_tokens_taken_away_stay_away(limits: dict[str, float], device: torch.device) -> None:
    logits = torch.full((6, VOCABULARY), -torch.inf, device=device)
    allowed = [2, 255, 400]
    logits[:, allowed] = torch.tensor([-1.0, 0.5, 0.0], device=device)
    rows = [Row(temperature=3.0, seed=seed, **limits) for seed in range(6)]
    tokens = chosen(logits, rows)[0].tolist()
    assert tokens == expected(logits, rows)
    assert set(tokens) <= set(allowed)


def test_row_that_allows_nothing_ends(device: torch.device) -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf, device=device)
    status = chosen(logits, [Row(temperature=1.0, top_k=4, top_p=0.5, min_p=0.1)])
    assert status[2].item() == 0
    assert 0 <= status[0, 0] < VOCABULARY


def test_draws_follow_the_truncated_distribution(device: torch.device) -> None:
    draws = 20_000 if device.type == "cuda" else 60
    logits = random(1, torch.bfloat16, device, seed=8)
    row = Row(temperature=2.0, seed=3, top_k=8, top_p=0.85, min_p=0.05)
    probabilities = kept(logits[0].double().tolist(), row)
    rows = [replace(row, counter=number) for number in range(draws)]
    tokens = chosen(logits.expand(draws, -1).contiguous(), rows)[0].tolist()

    assert set(tokens) <= set(probabilities)
    statistic = sum(
        (tokens.count(token) - draws * probability) ** 2 / (draws * probability)
        for token, probability in probabilities.items()
    )
    freedom = len(probabilities) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


BLOCK = 256
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _orders(values, keys, back, COUNT: tl.constexpr, UNUSED_BITS: tl.constexpr):
    here = tl.arange(0, COUNT)
    ordered = order(tl.load(values + here).to(tl.float32), UNUSED_BITS)
    tl.store(keys + here, ordered)
    tl.store(back + here, value_of(ordered, UNUSED_BITS))


@triton.jit
def _search(
    logits,
    peak,
    limit,
    keys,
    found,
    WEIGHED: tl.constexpr,
    ROUNDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search in so many passes first, then to the end."""
    low, high, above = tl.load(keys), tl.load(keys + 1), tl.full((), 0.0, tl.float64)
    none = above
    if ROUNDS > 0:
        low, high, above = search(
            logits,
            VOCABULARY,
            low,
            high,
            none,
            none,
            tl.load(limit),
            tl.load(peak),
            1.0,
            VOCABULARY,
            BLOCK,
            0,
            WEIGHED=WEIGHED,
            ROUNDS=ROUNDS,
        )
    tl.store(found + 2, value_of(low, 0))
    tl.store(found + 3, value_of(high, 0))
    key, _, above = search(
        logits,
        VOCABULARY,
        low,
        high,
        above,
        none,
        tl.load(limit),
        tl.load(peak),
        1.0,
        VOCABULARY,
        BLOCK,
        0,
        WEIGHED=WEIGHED,
        ROUNDS=0,
    )
    tl.store(found, value_of(key, 0))
    tl.store(found + 1, above.to(tl.float32))


@triton.jit
def _collect(logits, bounds, few, few_ids, number, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    low, high = tl.load(bounds), tl.load(bounds + 1)
    tl.store(number, collect(logits, low, high, few, few_ids, VOCABULARY, BLOCK))


@triton.jit
def _kth_group_peak(logits, peak, k, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(peak, kth_largest(group_peaks(logits, VOCABULARY, BLOCK), tl.load(k)))


def keys_of(values: Tensor) -> tuple[Tensor, Tensor]:
    keys = torch.empty(len(values), dtype=torch.int32, device=values.device)
    back = torch.empty(len(values), dtype=torch.float32, device=values.device)
    _orders[1,](values, keys, back, COUNT=len(values), UNUSED_BITS=UNUSED_BITS[values.dtype])
    return keys, back


@pytest.mark.parametrize("dtype", UNUSED_BITS)
def test_keys_are_in_the_numbers_order_and_lead_back(dtype: torch.dtype, device: torch.device) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor(
        [-torch.inf, -7.5, -7.0, -tiny, -0.0, 0.0, tiny, 1.0, 1.5, 4.0, 4.5, 100.0], dtype=dtype
    )
    values = torch.cat([values, values[-1:].expand(4)]).to(device)

    keys, back = keys_of(values)

    assert torch.equal(keys[1:] > keys[:-1], values[1:] > values[:-1])
    assert torch.equal(keys[1:] == keys[:-1], values[1:] == values[:-1])
    assert torch.equal(back, values.float())


def found(logits: Tensor, limit: float, *, weighed: bool, rounds: int = 0) -> list[float]:
    """Return the threshold, what is above it, and the ends of the range after `rounds` passes."""
    result = torch.empty(4, device=logits.device)
    peak = logits.max().reshape(1)
    keys, _ = keys_of(torch.cat([logits.min().reshape(1), peak]))
    limits = torch.tensor([limit], dtype=torch.float64, device=logits.device)
    shape = {"ROUNDS": rounds, "VOCABULARY": VOCABULARY, "BLOCK": BLOCK}
    _search[1,](logits, peak, limits, keys, result, WEIGHED=weighed, **shape)
    return result.tolist()


def random_logits(device: torch.device) -> Tensor:
    return (torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).to(device)


@pytest.mark.parametrize("k", [1, 2, 77, VOCABULARY - 1, VOCABULARY])
def test_search_by_count_finds_the_kth_largest(k: int, device: torch.device) -> None:
    logits = random_logits(device)
    kth = logits.sort(descending=True).values[k - 1].item()
    assert found(logits, k, weighed=False)[:2] == [kth, k - 1]


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_search_by_weight_finds_where_the_share_is_reached(
    share: float, rounds: int, device: torch.device
) -> None:
    logits = random_logits(device)
    ordered = logits.sort(descending=True).values
    weights = (ordered.double() - ordered[0].double()).exp()
    limit = share * weights.sum()
    last = int((weights.cumsum(0) - weights < limit).sum()) - 1

    threshold, above, low, high = found(logits, float(limit), weighed=True, rounds=rounds)

    assert threshold == ordered[last].item()
    assert low <= threshold <= high
    assert high - low <= (ordered[0] - ordered[-1]).item() / 4**rounds * 1.001
    assert above == pytest.approx(weights[:last].sum().item(), rel=1e-6)


@pytest.mark.parametrize("k", [1, 5, 50, GROUPS.value])
def test_kth_largest_group_peak_is_no_larger_than_the_kth_largest(k: int, device: torch.device) -> None:
    logits = random_logits(device)
    peak = torch.empty(1, device=device)
    _kth_group_peak[1,](logits, peak, torch.tensor([k], device=device), VOCABULARY=VOCABULARY, BLOCK=BLOCK)
    ordered = logits.sort(descending=True).values
    assert peak.item() in ordered.tolist()
    assert peak <= ordered[k - 1]
    # And close by: it is what cuts most passes off.
    assert peak > ordered[min(VOCABULARY - 1, 5 * k + 20)]


@pytest.mark.parametrize(("low", "high"), [(3.0, 100.0), (-0.5, 0.25), (-torch.inf, 100.0), (50.0, 60.0)])
def test_tokens_are_collected_or_counted(low: float, high: float, device: torch.device) -> None:
    logits = random_logits(device)
    logits[5] = math.nan
    few = torch.empty(BLOCK, device=device)
    few_ids = torch.full((BLOCK,), -1, dtype=torch.int32, device=device)
    number = torch.empty(1, dtype=torch.int32, device=device)
    bounds = torch.tensor([low, high], device=device)

    _collect[1,](logits, bounds, few, few_ids, number, VOCABULARY=VOCABULARY, BLOCK=BLOCK)

    usable = logits.nan_to_num(-torch.inf)
    wanted = ((usable >= low) & (usable <= high)).nonzero().flatten().tolist()
    assert number.item() == len(wanted)
    if len(wanted) <= BLOCK:
        ids = few_ids[: len(wanted)]
        assert sorted(ids.tolist()) == wanted
        assert few.tolist() == logits[ids].tolist() + [-torch.inf] * (BLOCK - len(wanted))
