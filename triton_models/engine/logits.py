"""Logits of prompts: what the model makes of every token of a prompt, for whoever samples elsewhere.

The scheduler puts at most `LOGITS_ROWS` tokens of such prompts into a step, which bounds the memory. Steps
without such requests do none of this.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad

from triton_models.engine.scoring import SLICE_ROWS, PromptChunk, with_reports
from triton_models.engine.sequence import PromptLogits
from triton_models.engine.step import Sampled


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The logits of the tokens of `chunks`: [tokens, vocabulary] float32, and whether each row is finite."""

    chunks: list[PromptChunk]
    values: Tensor
    finite: Tensor


def compute_logits(
    chunks: list[PromptChunk], hidden: Tensor, logits: Callable[[Tensor], Tensor]
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
    """Add the logits, which are on the host, to the results of the same step; as `with_reports`."""

    def report(result: Sampled, chunk: PromptChunk, known: int, new: range) -> Sampled:
        here = slice(new.start, new.stop)
        if not rows.finite[here].all():
            return Sampled.not_finite(chunk.sequence)
        return replace(result, prompt_logits=PromptLogits(chunk.first + known, rows.values[here]))

    return with_reports(results, rows.chunks, report)
