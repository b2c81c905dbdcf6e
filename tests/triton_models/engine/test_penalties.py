from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.fake_model import request
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Chunk, Sequence
from triton_models.engine.slots import (
    GENERATED,
    IN_PROMPT,
    GuessedRows,
    PenalisedRows,
    PenaltyTable,
    Staging,
    stage_penalties,
)

CPU = torch.device("cpu")


def sequence(slot: int, prompt: list[int], answer: list[int], **penalties: float) -> Sequence:
    asked = request(f"r{slot}", prompt, SamplingParams(**penalties))
    made = Sequence(asked, arrival=0, arrived_at=0.0, max_tokens=8)
    made.slot = slot
    made.tokens += answer
    return made


def staged(*sequences: Sequence) -> dict[str, Tensor]:
    """What the step uploads in which the prompts of some sequences end."""
    staging = Staging()
    stage_penalties(staging, [Chunk(each, 0, len(each.tokens), samples=True) for each in sequences])
    staging.integers("anything", [1])
    return staging.upload(CPU)


def status(tokens: list[int], allowed: list[int] | None = None) -> Tensor:
    """A `SamplerOutputs.status`."""
    return torch.tensor([tokens, [1] * len(tokens), allowed or [1] * len(tokens)])


def load(table: PenaltyTable, *sequences: Sequence) -> None:
    table.load(SimpleNamespace(**staged(*sequences)))


def test_a_row_is_built_from_all_known_tokens_and_nothing_of_the_last_holder() -> None:
    table = PenaltyTable(3, 9, CPU)
    load(table, sequence(1, [0, 0, 8], [8, 2, 2], frequency_penalty=1.0, presence_penalty=-0.5))
    assert table.seen[1].tolist() == [
        IN_PROMPT, 0, 2 * GENERATED, 0, 0, 0, 0, 0, IN_PROMPT + GENERATED
    ]  # fmt: skip
    assert table.factors[:, 1].tolist() == [1.0, -0.5, 1.0]
    load(table, sequence(1, [3], [], repetition_penalty=1.5), sequence(0, [4], [4], presence_penalty=2.0))
    assert table.seen[1].tolist() == [0, 0, 0, IN_PROMPT, 0, 0, 0, 0, 0]
    assert table.factors[:, 1].tolist() == [1.5, 0.0, 0.0]
    assert table.seen[0, 4] == IN_PROMPT + GENERATED
    assert not table.seen[2].any()


def test_without_penalties_and_before_the_prompt_ends_nothing_is_staged_or_loaded() -> None:
    staging = Staging()
    stage_penalties(staging, [Chunk(sequence(1, [0, 8], [], presence_penalty=1.0), 0, 1, samples=False)])
    staging.integers("anything", [1])
    for views in (staging.upload(CPU), staged(), staged(sequence(1, [0, 8], [8]))):
        assert not any(len(view) for name, view in views.items() if name != "anything")
        table = PenaltyTable(3, 9, CPU)
        table.load(SimpleNamespace(**views))
        assert not table.seen.any()


def test_a_step_counts_what_it_sampled_in_rows_with_penalties_alone() -> None:
    table = PenaltyTable(4, 9, CPU)
    rows = PenalisedRows(table, torch.tensor([0, 2]), torch.tensor([3, 1]))
    rows.count(status([5, 6, 7]))
    rows.count(status([5, 6, 8]))
    wanted = torch.zeros(4, 9, dtype=torch.int32)
    wanted[3, 5] = 2 * GENERATED
    wanted[1, [7, 8]] = GENERATED
    assert torch.equal(table.seen, wanted)


@pytest.mark.parametrize(
    ("penalties", "wanted"),
    [
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 1.0, 2.0]),
        ({"frequency_penalty": 0.5}, [2.0, -2.5, 1.0, 2.0]),
        ({"presence_penalty": 0.5}, [2.0, -2.5, 1.5, 2.0]),
        # Divided or multiplied first, or 2.0 would become (2.0 - 1.5) / 2.
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
            [1.0, -5.0, -0.5, 2.0],
        ),
    ],
)
def test_penalties_as_they_are_defined(penalties: dict[str, float], wanted: list[float]) -> None:
    table = PenaltyTable(2, 4, CPU)
    load(table, sequence(1, [0, 1], [1, 2, 2], **penalties))
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0], [2.0, -2.0, 2.0, 2.0]])
    PenalisedRows(table, torch.tensor([0]), torch.tensor([1])).apply(logits)
    assert logits.tolist() == [wanted, [2.0, -2.0, 2.0, 2.0]]


def guessed(*places: tuple[int, int], before: tuple[list[int], list[int]] = ([], [])) -> GuessedRows:
    ahead, guesses = zip(*places, strict=True)
    return GuessedRows(torch.tensor(ahead), torch.tensor(guesses), torch.tensor(before).flatten())


def test_a_guess_is_right_if_it_was_drawn_and_those_before_are_right_and_something_may_follow() -> None:
    none, places = (0, -1), [(1, 5), (2, 6), (3, 7)]
    rows = guessed(none, *places, none, none, *places, none, *places)
    tokens = [*(5, 6, 7, 1), 4, *(5, 0, 7, 1), *(5, 6, 7, 1)]
    allowed = [*(1, 1, 1, 1), 1, *(1, 1, 1, 1), *(1, 0, 1, 1)]
    assert rows.right(status(tokens, allowed)).tolist() == [
        *(True, True, True, True),
        True,
        *(True, True, False, False),
        *(True, False, False, False),
    ]


def test_a_row_after_guesses_is_penalised_as_if_these_were_generated_and_only_right_ones_are_counted() -> (
    None
):
    table = PenaltyTable(2, 9, CPU)
    load(table, sequence(1, [0], [1], frequency_penalty=0.5), sequence(0, [0], [1], frequency_penalty=0.5))
    before, (none, first, second) = table.seen.clone(), [(0, -1), (1, 2), (2, 2)]
    # Three rows of slot 1, with the guesses 2 and 2, and one of slot 0.
    rows = PenalisedRows(
        table,
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([1, 1, 1, 0]),
        guessed(none, first, second, none, before=([1, 2, 2], [2, 2, 2])),
    )
    logits = torch.zeros(4, 9)
    rows.apply(logits)
    assert [row[:3] for row in logits.tolist()] == [
        [0, -0.5, 0],
        [0, -0.5, -0.5],
        [0, -0.5, -1],
        [0, -0.5, 0],
    ]
    assert torch.equal(table.seen, before)
    rows.count(status([2, 2, 7, 4]))
    before[1, 2] += 2 * GENERATED
    before[1, 7] += GENERATED
    before[0, 4] += GENERATED
    assert torch.equal(table.seen, before)
    rows.count(status([2, 6, 7, 4]))
    before[1, 2] += GENERATED
    before[1, 6] += GENERATED
    before[0, 4] += GENERATED
    assert torch.equal(table.seen, before)


def test_the_counts_take_four_bytes_for_each_slot_and_token() -> None:
    assert PenaltyTable(128, 65024, torch.device("meta")).seen.nbytes == 128 * 65024 * 4


def test_loading_does_not_wait_for_the_device() -> None:
    meta = torch.device("meta")
    views = staged(sequence(1, [0, 1], [1, 2, 2], repetition_penalty=2.0))
    PenaltyTable(2, 4, meta).load(SimpleNamespace(**{name: view.to(meta) for name, view in views.items()}))
