import pytest
import torch

from triton_models.engine.kernels import penalties
from triton_models.engine.kernels.penalties import penalise
from triton_models.engine.sampler import SamplerInputs, sample
from triton_models.engine.slots import GENERATED, IN_PROMPT, GuessedRows, PenalisedRows, PenaltyTable

VOCABULARY = 700
SLOTS = 9


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows of few tokens into blocks as rows of many are."""
    monkeypatch.setattr(penalties, "_BLOCK", 256)


def some(device: torch.device, *, guessed: bool = False) -> PenalisedRows:
    """Five of seven rows, in slots of their own; two with guesses before them, if asked for."""
    dice = torch.Generator().manual_seed(3)
    table = PenaltyTable(SLOTS, VOCABULARY, device)
    seen = torch.randint(-20, 5, (SLOTS, VOCABULARY), generator=dice).clamp(min=0)
    table.seen.copy_(seen * GENERATED + torch.randint(0, 2, seen.shape, generator=dice) * IN_PROMPT)
    table.factors.copy_(torch.rand((3, SLOTS), generator=dice) * 2 + 0.1)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    before = GuessedRows(
        integers(0, 0, 1, 2, 0, 0, 0), integers(-1, -1, 5, 6, -1, -1, -1), integers(2, 2, 5, 6)
    )
    return PenalisedRows(table, integers(0, 1, 3, 5, 6), integers(8, 0, 4, 4, 2), before if guessed else None)


def random(device: torch.device) -> torch.Tensor:
    return (torch.randn((7, VOCABULARY), generator=torch.Generator().manual_seed(5)) * 4).to(device)


@pytest.mark.parametrize("guessed", [False, True])
def test_the_logits_are_those_of_the_plain_operations(device: torch.device, *, guessed: bool) -> None:
    rows, logits = some(device, guessed=guessed), random(device)
    plain = logits.clone()
    rows.apply(plain)
    penalise(rows, logits)
    assert not torch.equal(plain, random(device))
    # A GPU multiplies and subtracts in one step, rounding once.
    torch.testing.assert_close(logits, plain, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_found_after_penalties(broken: float, device: torch.device) -> None:
    logits = random(device)
    logits[3, 600] = broken

    def number(value: float) -> torch.Tensor:
        return torch.full((7,), value, device=device)

    inputs = SamplerInputs(
        temperatures=number(0.0),
        seeds=number(0).long(),
        counters=number(0).long(),
        top_k=number(0).long(),
        top_p=number(1.0).double(),
        min_p=number(0.0).double(),
        random=False,
        penalties=some(device),
    )
    assert sample(logits, inputs, penalise=penalise).status[1].tolist() == [1, 1, 1, 0, 1, 1, 1]
