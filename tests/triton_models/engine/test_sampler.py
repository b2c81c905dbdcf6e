import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.sampler_rows import (
    VOCABULARY,
    chi_square_holds,
    distribution,
    inputs,
    on_meta,
    run,
    some_logits,
    tokens,
)
from triton_models.engine.sampler import SamplerInputs, sample
from triton_models.engine.slots import GuessedRows

DRAWS = 5_000


HISTORY = {"prompt": [2, 3, 5, 8], "answer": [3, 3, 13, 21, 21, 21]}


@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 1, "top_p": 0.5},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
        {"min_p": 0.02, "top_p": 0.6},
        {"repetition": 1.4, **HISTORY},
        {"repetition": 0.7, **HISTORY},
        {"presence": 1.5, **HISTORY},
        {"frequency": 0.9, **HISTORY},
        {"frequency": -0.5, "presence": -1.0, **HISTORY},
        {"repetition": 1.2, "presence": 0.5, "frequency": 0.3, **HISTORY},
        {"repetition": 1.3, "bias": {3: 2.5, 21: -4.0, 30: 3.0}, **HISTORY},
        {
            "temperature": 1.3,
            "repetition": 1.2,
            "frequency": 0.4,
            "bias": {13: 3.0},
            "banned": [1, 3],
            "min_p": 0.02,
            "top_k": 20,
            "top_p": 0.95,
            **HISTORY,
        },
        {"presence": 1.0, "allowed": [*range(2, 30)], "top_p": 0.8, **HISTORY},
    ],
)
def test_draws_follow_the_distribution(row: dict[str, Any]) -> None:
    row = {"temperature": 1.0, "seed": 11, **row}
    logits = some_logits()
    chosen = tokens(logits.repeat(DRAWS, 1), *({**row, "counter": number} for number in range(DRAWS)))
    counts = torch.bincount(torch.tensor(chosen), minlength=VOCABULARY).tolist()
    assert chi_square_holds(counts, distribution(logits[0].tolist(), row))


@pytest.mark.parametrize("row", [{"repetition": 1.4, **HISTORY}, {"frequency": 0.9, **HISTORY}])
def test_the_distribution_test_sees_a_penalty_that_is_not_there(row: dict[str, Any]) -> None:
    logits = some_logits()
    plain = {"temperature": 1.0, "seed": 11}
    chosen = tokens(logits.repeat(DRAWS, 1), *({**plain, "counter": number} for number in range(DRAWS)))
    counts = torch.bincount(torch.tensor(chosen), minlength=VOCABULARY).tolist()
    assert not chi_square_holds(counts, distribution(logits[0].tolist(), {**plain, **row}))


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.3, 1.0, 2.0]),
        "seed": st.integers(0, 5),
        "counter": st.integers(0, 5),
    },
    optional={
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition": st.floats(0.1, 10.0),
        "presence": st.floats(-2.0, 2.0),
        "frequency": st.floats(-2.0, 2.0),
        "prompt": st.lists(st.integers(0, 39), max_size=6),
        "answer": st.lists(st.integers(0, 39), max_size=6),
        "bias": st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=4),
        "banned": st.sets(st.integers(0, 39), max_size=4),
        "allowed": st.sets(st.integers(0, 39), min_size=5),
        "logprobs": st.integers(0, 20),
    },
)


@given(st.lists(ROWS, min_size=2, max_size=8), st.integers(0, 100))
def test_a_row_gets_the_same_in_any_company(rows: list[dict[str, Any]], seed: int) -> None:
    logits = some_logits(len(rows), seed)
    together = run(logits, *rows)
    place = 0
    for number, row in enumerate(rows):
        alone = run(logits[number : number + 1], row)
        assert together.status[:, number].tolist() == alone.status[:, 0].tolist()
        if "logprobs" not in row:
            continue
        width = row["logprobs"]
        assert together.logprobs is not None
        assert alone.logprobs is not None
        assert torch.equal(together.logprobs[place, : 1 + width], alone.logprobs[0])
        place += 1


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, [9, 3]] = 5.0
    logits[1, 17] = 1.0
    assert tokens(logits, {}, {}) == [3, 17]


@pytest.mark.parametrize("row", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_what_leaves_one_token_draws_it(row: dict[str, Any]) -> None:
    logits = some_logits(50)
    rows = [{"temperature": 2.0, "seed": number, **row} for number in range(50)]
    assert tokens(logits, *rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("row", [{"top_k": 3}, {"top_p": 2.5 / 2000}])
def test_of_equals_the_first_ids_are_kept(row: dict[str, Any]) -> None:
    rows = [{"temperature": 1.0, "seed": number, **row} for number in range(60)]
    assert set(tokens(torch.zeros(60, 2000), *rows)) == {0, 1, 2}


def test_extreme_logits_and_temperatures_stay_numbers() -> None:
    logits = some_logits(3) * 1e30
    rows = [{"temperature": each} for each in (1e-5, 1.0, 2.0)]
    outputs = run(logits, *rows)
    assert outputs.status[0].tolist() == logits.argmax(dim=-1).tolist()
    assert outputs.status[1:].all()


def test_bias_bans_and_masks_decide() -> None:
    logits = some_logits(4)
    best = logits.argmax(dim=-1).tolist()
    chosen = tokens(
        logits,
        {"bias": {5: 100.0}},
        {"banned": [best[1]]},
        {"allowed": [31, 39], "temperature": 2.0, "seed": 4},
        {"bias": {best[3]: -100.0}, "temperature": 1.0},
    )
    assert chosen[0] == 5
    assert chosen[1] == logits[1].topk(2).indices[1]
    assert chosen[2] in {31, 39}
    assert chosen[3] != best[3]


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = some_logits(2)
    expected = logits.double().log_softmax(dim=-1)
    row = {"temperature": 0.2, "top_k": 3, "bias": {7: 50.0}, "logprobs": 20, "frequency": 2.0, "answer": [7]}
    outputs = run(logits, {}, row)
    assert outputs.logprobs is not None
    assert outputs.top_ids is not None
    assert outputs.status[0, 1] == 7
    assert outputs.logprobs[0, 0].item() == pytest.approx(expected[1, 7].item(), abs=1e-5)
    top = expected[1].topk(20)
    assert outputs.top_ids[0].tolist() == top.indices.tolist()
    assert outputs.logprobs[0, 1:].tolist() == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_marked_and_touches_no_other(bad: float) -> None:
    logits = some_logits(3)
    expected = tokens(logits, *({"temperature": 1.0, "seed": number} for number in range(3)))
    logits[1, 20] = bad
    outputs = run(logits, *({"temperature": 1.0, "seed": number} for number in range(3)))
    assert outputs.status[1].tolist() == [1, 0, 1]
    assert outputs.status[0, [0, 2]].tolist() == [expected[0], expected[2]]


def test_a_row_without_an_allowed_token_is_marked() -> None:
    outputs = run(some_logits(2), {"allowed": []}, {"temperature": 1.0, "allowed": [1]})
    assert outputs.status[2].tolist() == [0, 1]
    assert outputs.status[0, 1] == 1


def test_half_precision_logits_are_sampled_in_single() -> None:
    logits = some_logits(1).half()
    outputs = run(logits, {"logprobs": 1})
    assert outputs.logprobs is not None
    assert outputs.logprobs.dtype == torch.float32
    assert outputs.logprobs[0, 1].item() == pytest.approx(
        logits.float().log_softmax(-1).max().item(), abs=1e-6
    )


def test_nothing_before_the_last_stage_waits_for_the_device() -> None:
    # Tensors of the device "meta" have no values: an operation that needs one on the host fails.
    def choose_there(logits: Tensor, inputs: SamplerInputs) -> Tensor:
        return torch.empty((3, len(logits)), dtype=torch.int64, device=logits.device)

    rows = [
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "allowed": [1, 2], "logprobs": 3},
        {"repetition": 1.1, "frequency": 1.0, **HISTORY, "bias": {5: 1.0}, "banned": [4], "logprobs": 20},
    ]
    there = inputs(rows)
    assert there.penalties is not None
    ahead, guesses, before = torch.tensor([0, 1]), torch.tensor([-1, 7]), torch.tensor([0, 7])
    there.penalties = replace(there.penalties, guessed=GuessedRows(ahead, guesses, before))
    made = on_meta(there)
    outputs = sample(torch.empty((2, VOCABULARY), device="meta"), made, choose_there)
    assert made.penalties is not None
    made.penalties.count(outputs.status)
    assert outputs.status.device.type == "meta"
