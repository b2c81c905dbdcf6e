import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.thresholds import GROUPS, kth_group_peak, order, search, value_of

BLOCK = 256
VOCABULARY = 600
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _orders(values, keys, back, COUNT: tl.constexpr, UNUSED_BITS: tl.constexpr):
    here = tl.arange(0, COUNT)
    ordered = order(tl.load(values + here).to(tl.float32), UNUSED_BITS)
    tl.store(keys + here, ordered)
    tl.store(back + here, value_of(ordered, UNUSED_BITS))


@triton.jit
def _search(
    logits, peak, limit, keys, found, WEIGHED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    key, above = search(
        logits,
        tl.load(keys),
        tl.load(keys + 1),
        tl.load(limit),
        tl.load(peak),
        1.0,
        VOCABULARY,
        BLOCK,
        0,
        WEIGHED=WEIGHED,
    )
    tl.store(found, value_of(key, 0))
    tl.store(found + 1, above.to(tl.float32))


@triton.jit
def _kth_group_peak(logits, peak, k, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(peak, kth_group_peak(logits, tl.load(k), VOCABULARY, BLOCK))


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


def found(logits: Tensor, limit: float, *, weighed: bool) -> tuple[float, float]:
    result = torch.empty(2, device=logits.device)
    peak = logits.max().reshape(1)
    keys, _ = keys_of(torch.cat([logits.min().reshape(1), peak]))
    limits = torch.tensor([limit], dtype=torch.float64, device=logits.device)
    _search[1,](logits, peak, limits, keys, result, WEIGHED=weighed, VOCABULARY=VOCABULARY, BLOCK=BLOCK)
    return result[0].item(), result[1].item()


def random_logits(device: torch.device) -> Tensor:
    return (torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).to(device)


@pytest.mark.parametrize("k", [1, 2, 77, VOCABULARY - 1, VOCABULARY])
def test_search_by_count_finds_the_kth_largest(k: int, device: torch.device) -> None:
    logits = random_logits(device)
    kth = logits.sort(descending=True).values[k - 1].item()
    assert found(logits, k, weighed=False) == (kth, k - 1)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_search_by_weight_finds_where_the_share_is_reached(share: float, device: torch.device) -> None:
    logits = random_logits(device)
    ordered = logits.sort(descending=True).values
    weights = (ordered.double() - ordered[0].double()).exp()
    limit = share * weights.sum()
    last = int((weights.cumsum(0) - weights < limit).sum()) - 1

    threshold, above = found(logits, float(limit), weighed=True)

    assert threshold == ordered[last].item()
    assert above == pytest.approx(weights[:last].sum().item(), rel=1e-6)


@pytest.mark.parametrize("k", [1, 5, 50, GROUPS.value])
def test_kth_group_peak_is_no_larger_than_the_kth_largest(k: int, device: torch.device) -> None:
    logits = random_logits(device)
    peak = torch.empty(1, device=device)
    _kth_group_peak[1,](logits, peak, torch.tensor([k], device=device), VOCABULARY=VOCABULARY, BLOCK=BLOCK)
    ordered = logits.sort(descending=True).values
    assert peak.item() in ordered.tolist()
    assert peak <= ordered[k - 1]
    # And close by: it is what cuts most passes off.
    assert peak > ordered[min(VOCABULARY - 1, 5 * k + 20)]
