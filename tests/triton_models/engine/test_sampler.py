import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample

VOCABULARY = 40


def inputs(rows: list[dict[str, Any]]) -> SamplerInputs:
    """Build the inputs of `rows`, each given by what is not greedy and plain about it."""
    truncated = [
        row for row, each in enumerate(rows) if each.get("top_k", 0) > 0 or each.get("top_p", 1.0) < 1
    ]
    bias = [(row, key, value) for row, each in enumerate(rows) for key, value in each.get("bias", {}).items()]
    banned = [(row, key) for row, each in enumerate(rows) for key in each.get("banned", ())]
    masked = [row for row, each in enumerate(rows) if "allowed" in each]
    words = torch.zeros((len(masked), -(-VOCABULARY // 32)), dtype=torch.int32)
    for place, row in enumerate(masked):
        for key in rows[row]["allowed"]:
            words[place, key // 32] |= torch.tensor(1 << key % 32).to(torch.int32)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return SamplerInputs(
        temperatures=floats([each.get("temperature", 0.0) for each in rows]).float(),
        seeds=integers([each.get("seed", 0) for each in rows]),
        counters=integers([each.get("counter", 0) for each in rows]),
        top_k=integers([each.get("top_k", 0) for each in rows]),
        top_p=floats([each.get("top_p", 1.0) for each in rows]),
        random=any(each.get("temperature") for each in rows),
        truncated=integers(truncated),
        bias_rows=integers([row for row, _, _ in bias]),
        bias_ids=integers([key for _, key, _ in bias]),
        bias_values=floats([value for _, _, value in bias]),
        banned_rows=integers([row for row, _ in banned]),
        banned_ids=integers([key for _, key in banned]),
        masked_rows=integers(masked),
        mask_words=words if masked else None,
        logprob_rows=integers([row for row, each in enumerate(rows) if "logprobs" in each]),
        top_logprobs=max((each.get("logprobs", 0) for each in rows), default=0),
    )


def run(logits: Tensor, *rows: dict[str, Any]) -> SamplerOutputs:
    return sample(logits.clone(), inputs(list(rows)))


def tokens(logits: Tensor, *rows: dict[str, Any]) -> list[int]:
    return run(logits, *rows).status[0].tolist()


def some_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 2


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The distribution, as its definition says, without a tensor."""
    weights = [math.exp(value / temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda key: (-weights[key], key))
    kept = order[:top_k] if top_k else order
    whole = sum(weights[key] for key in kept)
    nucleus: list[int] = []
    for key in kept:
        if sum(weights[each] for each in nucleus) / whole >= top_p:
            break
        nucleus.append(key)
    total = sum(weights[key] for key in nucleus)
    return [weights[key] / total if key in nucleus else 0.0 for key in range(len(weights))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.6, 0, 1.0),
        (1.8, 0, 1.0),
        (1.0, 7, 1.0),
        (1.0, 0, 0.7),
        (0.8, 12, 0.8),
        (1.5, 1, 0.5),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = some_logits()
    draws = 20_000
    row = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 11}
    chosen = tokens(logits.repeat(draws, 1), *({**row, "counter": number} for number in range(draws)))
    counts = torch.bincount(torch.tensor(chosen), minlength=VOCABULARY).tolist()
    expected = [draws * each for each in reference(logits[0].tolist(), temperature, top_k, top_p)]
    assert all(count == 0 for count, wanted in zip(counts, expected, strict=True) if wanted == 0)
    # Rare tokens are counted together, as the chi-square test wants.
    common = [(count, wanted) for count, wanted in zip(counts, expected, strict=True) if wanted >= 10]
    rare = [(count, wanted) for count, wanted in zip(counts, expected, strict=True) if 0 < wanted < 10]
    if rare:
        common.append((sum(count for count, _ in rare), sum(wanted for _, wanted in rare)))
    freedom = max(1, len(common) - 1)
    chi_square = sum((count - wanted) ** 2 / wanted for count, wanted in common)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.3, 1.0, 2.0]),
        "seed": st.integers(0, 5),
        "counter": st.integers(0, 5),
    },
    optional={
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.01, 1.0),
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


@pytest.mark.parametrize("row", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}])
def test_what_leaves_one_token_draws_it(row: dict[str, Any]) -> None:
    logits = some_logits(50)
    rows = [{"temperature": 2.0, "seed": number, **row} for number in range(50)]
    assert tokens(logits, *rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(("number", "token"), [(0.0, 2), (1 - 2.0**-48, 37)])
def test_the_ends_of_the_random_numbers_never_draw_what_has_no_probability(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
        return torch.full(seeds.shape, number, dtype=torch.float64)

    monkeypatch.setattr("triton_models.engine.sampler.uniform", uniform)
    assert tokens(some_logits(), {"temperature": 1.0, "banned": [0, 1, 38, 39]}) == [token]


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
    row = {"temperature": 0.2, "top_k": 3, "bias": {7: 50.0}, "logprobs": 20}
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
