"""Rows for the sampler, each given by what is not greedy and plain about it, and what they should come to."""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample
from triton_models.engine.slots import GENERATED, IN_PROMPT, PenalisedRows, PenaltyTable

VOCABULARY = 40


def inputs(rows: list[dict[str, Any]]) -> SamplerInputs:
    bias = [(row, key, value) for row, each in enumerate(rows) for key, value in each.get("bias", {}).items()]
    banned = [(row, key) for row, each in enumerate(rows) for key in each.get("banned", ())]
    masked = [row for row, each in enumerate(rows) if "allowed" in each]
    reported = [row for row, each in enumerate(rows) if "logprobs" in each]
    # Numbers of numpy are set in a tenth of the time that a tensor's take, and rows may be thousands.
    words = np.zeros((len(masked), -(-VOCABULARY // 32)), dtype=np.uint32)
    for place, row in enumerate(masked):
        for key in rows[row]["allowed"]:
            words[place, key // 32] |= np.uint32(1 << key % 32)

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
        min_p=floats([each.get("min_p", 0.0) for each in rows]),
        random=any(each.get("temperature") for each in rows),
        truncated=any(
            each.get("top_k", 0) > 0 or each.get("top_p", 1.0) < 1 or each.get("min_p", 0.0) > 0
            for each in rows
        ),
        penalties=penalties(rows),
        bias=(
            integers([row for row, _, _ in bias]),
            integers([key for _, key, _ in bias]),
            floats([value for _, _, value in bias]),
        )
        if bias
        else None,
        banned=(integers([row for row, _ in banned]), integers([key for _, key in banned]))
        if banned
        else None,
        masks=(integers(masked), torch.from_numpy(words.view(np.int32))) if masked else None,
        logprob_rows=integers(reported) if reported else None,
        top_logprobs=max((each.get("logprobs", 0) for each in rows), default=0),
    )


def run(logits: Tensor, *rows: dict[str, Any]) -> SamplerOutputs:
    return sample(logits.clone(), inputs(list(rows)))


def tokens(logits: Tensor, *rows: dict[str, Any]) -> list[int]:
    return run(logits, *rows).status[0].tolist()


def some_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 2


PENALTIES = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}


def penalties(rows: list[dict[str, Any]]) -> PenalisedRows | None:
    """Penalties of rows with `prompt` and `answer`; the first of the rows has the last slot."""
    penalised = [row for row, each in enumerate(rows) if not PENALTIES.keys().isdisjoint(each)]
    if not penalised:
        return None
    table = PenaltyTable(len(rows), VOCABULARY, torch.device("cpu"))
    factors, seen = table.factors.numpy(), table.seen.numpy()  # views
    slots = [len(rows) - 1 - row for row in penalised]
    for row, slot in zip(penalised, slots, strict=True):
        for number, (name, nothing) in enumerate(PENALTIES.items()):
            factors[number, slot] = rows[row].get(name, nothing)
        for key in rows[row].get("prompt", ()):
            seen[slot, key] |= IN_PROMPT
        for key in rows[row].get("answer", ()):
            seen[slot, key] += GENERATED
    return PenalisedRows(table, torch.tensor(penalised), torch.tensor(slots))


def distribution(logits: Sequence[float], row: dict[str, Any]) -> list[float]:
    """The probabilities of a row, as their definitions say, without a tensor."""
    values = [
        _penalised(key, value, row) + row.get("bias", {}).get(key, 0) for key, value in enumerate(logits)
    ]
    out = {key for key in range(len(values)) if key not in row.get("allowed", range(len(values)))}
    out |= set(row.get("banned", ()))
    most = max(value for key, value in enumerate(values) if key not in out)
    weights = [
        0.0 if key in out else math.exp((value - most) / row["temperature"])
        for key, value in enumerate(values)
    ]
    order = sorted(range(len(weights)), key=lambda key: (-weights[key], key))
    order = [key for key in order if weights[key] >= row.get("min_p", 0.0)]
    kept = order[: row.get("top_k") or len(order)]
    whole = sum(weights[key] for key in kept)
    nucleus: list[int] = []
    for key in kept:
        if sum(weights[each] for each in nucleus) / whole >= row.get("top_p", 1.0):
            break
        nucleus.append(key)
    total = sum(weights[key] for key in nucleus)
    return [weights[key] / total if key in nucleus else 0.0 for key in range(len(weights))]


def _penalised(key: int, value: float, row: dict[str, Any]) -> float:
    prompt, answer = row.get("prompt", []), row.get("answer", [])
    repetition = row.get("repetition", 1.0)
    if key in prompt or key in answer:
        value = value / repetition if value > 0 else value * repetition
    frequency, presence = row.get("frequency", 0.0), row.get("presence", 0.0)
    return float(value - frequency * answer.count(key) - presence * (key in answer))


def chi_square_holds(counts: Sequence[int], probabilities: Sequence[float]) -> bool:
    """Whether draws can well be of a distribution: within 4 standard deviations of the test's own."""
    draws = sum(counts)
    expected = [draws * each for each in probabilities]
    pairs = list(zip(counts, expected, strict=True))
    if any(count for count, wanted in pairs if wanted == 0):
        return False
    # Rare tokens are counted together, as the test wants.
    common = [pair for pair in pairs if pair[1] >= 10]
    rare = [pair for pair in pairs if 0 < pair[1] < 10]
    if rare:
        common.append((sum(count for count, _ in rare), sum(wanted for _, wanted in rare)))
    freedom = max(1, len(common) - 1)
    return sum((count - wanted) ** 2 / wanted for count, wanted in common) < freedom + 4 * math.sqrt(
        2 * freedom
    )


def on_meta(value: Any) -> Any:
    """Copy inputs to the device "meta", with all the tensors in them."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        return tuple(on_meta(each) for each in value)
    if isinstance(value, PenaltyTable):
        slots, vocabulary = value.seen.shape
        moved = PenaltyTable(slots, vocabulary, torch.device("meta"))
        assert vars(moved).keys() == vars(value).keys()
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: on_meta(getattr(value, each.name)) for each in fields(value)})
    return value
