import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triton_models.engine import processor_sampling
from triton_models.engine.processor_sampling import Truncation, kept
from triton_models.engine.truncation import truncate

FEW = 80
VOCABULARY = 8 * FEW
"""A top_k of FEW is looked for, of more the row is sorted."""


def rows(kind: str, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn((count, VOCABULARY), generator=generator)
    if kind == "peaked":
        values *= 6
    elif kind == "stepped":  # Crowds of equal values, at every threshold.
        values = (values * 3).round()
    elif kind == "level":
        values.zero_()
    return values - values.amax(dim=-1, keepdim=True)


def by_definition(row: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that stay, from whole sorted rows in float64."""
    weights = row.double().exp()
    order = [key for key in row.sort(descending=True, stable=True).indices.tolist() if weights[key] >= min_p]
    kept = order[: top_k or len(order)]
    if top_p == 1:
        return sorted(kept)
    before = torch.cat([torch.zeros(1).double(), weights[kept].cumsum(0)[:-1]])
    return sorted(key for key, sum_ in zip(kept, before, strict=True) if sum_ < top_p * weights[kept].sum())


def cut(scaled: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> list[list[int]]:
    """What stays by `truncate`, and the same by the processor's own way."""
    result = truncate(
        scaled.clone(),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
    )
    stays = result > -torch.inf
    assert torch.equal(result[stays], scaled[stays])
    found = [row.nonzero().flatten().tolist() for row in stays]
    rules = [Truncation(*each) for each in zip(top_k, top_p, min_p, strict=True)]
    for row, rule, ids in zip(scaled, rules, found, strict=True):
        assert kept(row.numpy(), row.exp().numpy(), rule).tolist() == ids
    return found


@pytest.mark.parametrize("kind", ["spread", "peaked", "stepped", "level"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (FEW - 1, 1.0, 0.0),
        (FEW, 1.0, 0.0),
        (FEW, 0.999, 0.0),
        (FEW + 1, 1.0, 0.0),
        (FEW + 1, 0.3, 0.0),
        (VOCABULARY, 0.5, 0.0),
        (2**31 - 1, 1.0, 0.0),
        (0, 1e-9, 0.0),
        (0, 0.3, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999999, 0.0),
        (0, 1.0, 1.0),
        (0, 1.0, 0.05),
        (0, 0.6, 0.02),
        (50, 0.8, 0.01),
    ],
)
def test_what_stays_is_what_the_definition_says(kind: str, top_k: int, top_p: float, min_p: float) -> None:
    scaled = rows(kind)
    wanted = [by_definition(row, top_k, top_p, min_p) for row in scaled]
    assert cut(scaled, [top_k] * 4, [top_p] * 4, [min_p] * 4) == wanted


RULES = st.tuples(
    st.one_of(st.just(0), st.integers(1, VOCABULARY + 5)),
    st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@given(
    st.lists(
        st.tuples(RULES, st.sampled_from(["spread", "peaked", "stepped", "level"])), min_size=1, max_size=6
    )
)
def test_each_row_has_its_own_rules_in_any_company(mix: list[tuple[tuple[int, float, float], str]]) -> None:
    scaled = torch.cat([rows(kind, count=1) for _, kind in mix])
    together = cut(scaled, *(list(values) for values in zip(*(rules for rules, _ in mix), strict=True)))
    for place, (rules, _) in enumerate(mix):
        assert cut(scaled[place : place + 1], *([value] for value in rules)) == [together[place]]


def test_of_most_rows_only_few_logits_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    sort = np.sort

    def counting(values: np.ndarray) -> np.ndarray:
        lengths.append(len(values))
        return sort(values)

    monkeypatch.setattr(processor_sampling.np, "sort", counting)
    for row in rows("peaked"):
        kept(row.numpy(), row.exp().numpy(), Truncation(top_k=0, top_p=0.8, min_p=0.0))
    assert max(lengths) < FEW
    kept(row.numpy(), row.exp().numpy(), Truncation(top_k=FEW, top_p=0.8, min_p=0.0))
    kept(row.numpy(), row.exp().numpy(), Truncation(top_k=0, top_p=1.0, min_p=0.1))
    assert len(lengths) == 4


def test_rows_without_numbers_touch_no_other() -> None:
    scaled = rows("spread")
    wanted = cut(scaled, [0] * 4, [0.5] * 4, [0.01] * 4)
    broken = scaled.clone()
    broken[1] = torch.nan
    broken[2, 5] = torch.nan
    halves = torch.full((4,), 0.5, dtype=torch.float64)
    result = truncate(broken.clone(), torch.zeros(4, dtype=torch.int64), halves, halves / 50)
    for row in (0, 3):
        assert (result[row] > -torch.inf).nonzero().flatten().tolist() == wanted[row]
