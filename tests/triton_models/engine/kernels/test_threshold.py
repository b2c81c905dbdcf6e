import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.threshold import (
    GROUPS,
    collect,
    group_peaks,
    kth_largest,
    load_usable,
    order,
    search,
    search_few,
    value_of,
    weights_beside,
)

VOCABULARY = 600
BLOCK, FEW = 256, 128
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
    FEW: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search in so many passes first, then to the end; where FEW is not 0, among those left in the range."""
    low, high, above = tl.load(keys), tl.load(keys + 1), tl.full((), 0.0, tl.float64)
    wanted, peak = tl.load(limit), tl.load(peak)
    if ROUNDS > 0:
        low, high, above = search(
            logits, low, high, above, wanted, peak, 1.0, VOCABULARY, BLOCK, 0, WEIGHED=WEIGHED, ROUNDS=ROUNDS
        )
    tl.store(found + 2, value_of(low, 0))
    tl.store(found + 3, value_of(high, 0))
    if FEW > 0:
        values = load_usable(logits, tl.arange(0, FEW), VOCABULARY)
        values = tl.where((values >= value_of(low, 0)) & (values <= value_of(high, 0)), values, float("-inf"))
        weights = weights_beside(values, peak, 1.0) if WEIGHED else tl.full((FEW,), 1.0, tl.float32)
        key, above = search_few(values, weights, low, high, above, wanted, 0)
    else:
        key, _, above = search(
            logits, low, high, above, wanted, peak, 1.0, VOCABULARY, BLOCK, 0, WEIGHED=WEIGHED, ROUNDS=0
        )
    tl.store(found, value_of(key, 0))
    tl.store(found + 1, above.to(tl.float32))


@triton.jit
def _collect(
    logits, bounds, few, few_ids, fit, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr
):
    low, high = tl.load(bounds), tl.load(bounds + 1)
    tl.store(fit, collect(logits, low, high, few, few_ids, VOCABULARY, BLOCK, FEW).to(tl.int32))


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


def found(logits: Tensor, limit: float, *, weighed: bool, few: bool, rounds: int = 0) -> list[float]:
    """Return the threshold, what is above it, and the ends of the range after `rounds` passes."""
    result = torch.empty(4, device=logits.device)
    peak = logits.max().reshape(1)
    keys, _ = keys_of(torch.cat([logits.min().reshape(1), peak]))
    limits = torch.tensor([limit], dtype=torch.float64, device=logits.device)
    shape = {"ROUNDS": rounds, "FEW": 1024 if few else 0, "VOCABULARY": VOCABULARY, "BLOCK": BLOCK}
    _search[1,](logits, peak, limits, keys, result, WEIGHED=weighed, **shape)
    return result.tolist()


def random_logits(device: torch.device) -> Tensor:
    return (torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).to(device)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("k", [1, 2, 77, VOCABULARY - 1, VOCABULARY])
def test_search_by_count_finds_the_kth_largest(k: int, device: torch.device, *, few: bool) -> None:
    logits = random_logits(device)
    kth = logits.sort(descending=True).values[k - 1].item()
    assert found(logits, k, weighed=False, few=few)[:2] == [kth, k - 1]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_search_by_weight_finds_where_the_share_is_reached(
    share: float, rounds: int, device: torch.device, *, few: bool
) -> None:
    logits = random_logits(device)
    ordered = logits.sort(descending=True).values
    weights = (ordered.double() - ordered[0].double()).exp()
    limit = share * weights.sum()
    last = int((weights.cumsum(0) - weights < limit).sum()) - 1

    threshold, above, low, high = found(logits, float(limit), weighed=True, few=few, rounds=rounds)

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


@pytest.mark.parametrize(
    ("low", "high"), [(3.0, 100.0), (-0.5, 0.25), (-torch.inf, 100.0), (-torch.inf, -4.0), (50.0, 60.0)]
)
def test_tokens_are_collected_if_they_fit(low: float, high: float, device: torch.device) -> None:
    logits = random_logits(device)
    logits[5] = math.nan
    few = torch.empty(FEW, device=device)
    few_ids = torch.full((FEW,), -1, dtype=torch.int32, device=device)
    fit = torch.empty(1, dtype=torch.int32, device=device)
    bounds = torch.tensor([low, high], device=device)

    _collect[1,](logits, bounds, few, few_ids, fit, VOCABULARY=VOCABULARY, BLOCK=BLOCK, FEW=FEW)

    usable = logits.nan_to_num(-torch.inf)
    wanted = ((usable >= low) & (usable <= high)).nonzero().flatten().tolist()
    assert fit.item() == (len(wanted) <= FEW)
    if fit:
        ids = few_ids[: len(wanted)]
        assert sorted(ids.tolist()) == wanted
        assert few.tolist() == usable[ids].tolist() + [-torch.inf] * (FEW - len(wanted))
