"""Logits of prompts: what the model makes of every token of a prompt, for whoever samples elsewhere.

The scheduler puts at most `LOGITS_ROWS` tokens of such prompts into a step, which bounds the memory. Steps
without such requests do none of this.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from triton_models.engine.models import ChunkRows
from triton_models.engine.scoring import SLICE_ROWS
from triton_models.engine.sequence import PromptLogits, Sequence
from triton_models.engine.step import Sampled, Step


@dataclass(frozen=True, slots=True)
class LogitsChunk:
    """`count` tokens of a prompt, from position `first` on, which the rows of the step from `row` on hold."""

    sequence: Sequence
    first: int
    count: int
    row: int


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The logits of the tokens of `chunks`: [tokens, vocabulary] float32, and whether each row is finite."""

    chunks: list[LogitsChunk]
    values: Tensor
    finite: Tensor

    def to_host(self) -> "LogitsRows":
        """Start copying to pinned host memory; whoever reads the copies must first wait for the device."""
        return replace(
            self,
            values=self.values.to("cpu", non_blocking=True),
            finite=self.finite.to("cpu", non_blocking=True),
        )


def logits_chunks(step: Step, rows: tuple[ChunkRows, ...]) -> list[LogitsChunk]:
    """Return the parts of a step's prompts whose logits are wanted; `rows`: its rows of each prompt chunk."""
    found = []
    for chunk, place in zip(step.told, rows, strict=True):
        request = chunk.sequence.request
        count = min(chunk.end, len(request.prompt_ids)) - chunk.start
        if request.logits and count > 0:
            found.append(LogitsChunk(chunk.sequence, chunk.start, count, place.start))
    return found


def compute_logits(
    chunks: list[LogitsChunk], hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> LogitsRows:
    """Return the logits of `chunks`, at least one.

    Args:
        chunks: of the step.
        hidden: the step's hidden rows, [T, width].
        logits: turns [S, width] into logits [S, vocabulary] of any float dtype; may overwrite what it gets.
    """
    rows = torch.cat([hidden[each.row : each.row + each.count] for each in chunks])
    count = len(rows)
    if rows.is_cuda:
        # Always the one shape that log-probabilities are computed with, so that no kernel is made for others.
        rows = pad(rows, (0, 0, 0, -count % SLICE_ROWS))
    values = logits(rows)[:count].float()
    return LogitsRows(chunks, values, values.isfinite().all(dim=1))


def with_logits(results: list[Sampled], rows: LogitsRows) -> list[Sampled]:
    """Add the logits, which are on the host, to the results of the same step.

    Must be called once for each step, in order.
    """
    wanting = {chunk.sequence for chunk in rows.chunks}
    by_sequence = {each.sequence: each for each in results if each.sequence in wanting}
    at = 0
    for chunk in rows.chunks:
        sequence = chunk.sequence
        # Tokens computed again after a preemption were reported before.
        known = min(max(0, sequence.scored - chunk.first), chunk.count)
        new = slice(at + known, at + chunk.count)
        at += chunk.count
        result = by_sequence.get(sequence) or Sampled(sequence)
        if known == chunk.count or result.fault is not None:
            continue
        if not rows.finite[new].all():
            by_sequence[sequence] = Sampled.not_finite(sequence)
            continue
        sequence.scored += chunk.count - known
        reported = PromptLogits(chunk.first + known, rows.values[new])
        by_sequence[sequence] = replace(result, prompt_logits=reported)
    with_others = [by_sequence.pop(each.sequence, each) for each in results]
    return with_others + list(by_sequence.values())
