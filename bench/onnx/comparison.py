"""Compares entries that decode greedily, in turns. Knows neither Triton nor ONNX."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

_PROMPT = 64

Prompts = list[list[int]]
Ask = Callable[[Prompts, int], Prompts]
"""Decodes so many tokens of each prompt, greedily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRow:
    """One entry at one batch size; medians over the rounds."""

    model: str
    entry: str
    batch: int
    first_ms: float
    """Until answers of one token are there."""
    step_ms: float
    cpu_ms: float
    """CPU time of a step: of the server, its stubs and all threads."""
    tokens_per_second: float
    """Of all sequences, in decode steps."""
    times: float
    """Of our float32's rate."""
    same: float
    """Share of the tokens that are our float32's, up to each answer's first other one."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds: until answers of one token, of a decode step, and its CPU time."""

    first: float
    step: float
    cpu: float


def measure(
    family: str,
    asks: dict[str, Ask],
    cpu_s: Callable[[], float],
    *,
    batches: tuple[int, ...],
    rounds: int,
    new_tokens: int,
) -> Iterator[OnnxRow]:
    """Ask every entry once a round, one after the other; the first round is not counted.

    Args:
        family: what the rows are named by.
        asks: by the entries' names; tokens and times are compared with the first one's.
        cpu_s: returns the CPU time so far, in seconds.
        batches: numbers of prompts.
        rounds: those that count.
        new_tokens: of each long answer.
    """
    taken: dict[tuple[int, str], list[_Taken]] = {each: [] for each in product(batches, asks)}
    same: dict[tuple[int, str], list[float]] = {each: [] for each in taken}
    for number in range(rounds + 1):
        expected: Prompts = []
        for (batch, entry), seconds in taken.items():
            dice = random.Random(f"{number} {batch}")  # noqa: S311 - prompts are no secret
            short, long = ([dice.choices(range(256), k=_PROMPT) for _ in range(batch)] for _ in range(2))
            marks = [(time.perf_counter(), cpu_s())]
            asks[entry](short, 1)
            marks.append((time.perf_counter(), cpu_s()))
            answers = asks[entry](long, new_tokens)
            marks.append((time.perf_counter(), cpu_s()))
            began, middle, end = marks
            first, cpu_first = middle[0] - began[0], middle[1] - began[1]
            step, cpu = end[0] - middle[0] - first, end[1] - middle[1] - cpu_first
            if entry == next(iter(asks)):
                expected = answers
            if number:
                seconds.append(_Taken(first, step / (new_tokens - 1), cpu / (new_tokens - 1)))
                same[batch, entry].append(_same(answers, expected))
    for (batch, entry), seconds in taken.items():
        step, usual = (
            statistics.median(each.step for each in taken[batch, name]) for name in (entry, next(iter(asks)))
        )
        yield OnnxRow(
            model=family,
            entry=entry,
            batch=batch,
            first_ms=1000 * statistics.median(each.first for each in seconds),
            step_ms=1000 * step,
            cpu_ms=1000 * statistics.median(each.cpu for each in seconds),
            tokens_per_second=batch / step,
            times=usual / step,
            same=statistics.mean(same[batch, entry]),
        )


def _same(answers: Prompts, expected: Prompts) -> float:
    """Return the share of tokens before each answer's first unexpected one."""
    count = 0
    for answer, wanted in zip(answers, expected, strict=True):
        pairs = [one == other for one, other in zip(answer, wanted, strict=True)]
        count += (*pairs, False).index(False)
    return count / sum(map(len, expected))
