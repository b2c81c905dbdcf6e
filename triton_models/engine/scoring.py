"""Log-probabilities of prompts: how likely each of a prompt's tokens was to the model.

A prompt's hidden states go on to logits in the step that computes them, one slice of rows at a time, which
bounds the memory needed. All slices have the same size (the last one is padded), so that a device computes
only one shape. Steps without such requests do none of this.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan

import torch
from torch import Tensor
from torch.nn.functional import pad

from triton_models.engine.models import ChunkRows
from triton_models.engine.sequence import Sequence, TokenLogprobs
from triton_models.engine.slots import Staged, Staging
from triton_models.engine.step import Sampled, Step, token_logprobs

SLICE_ROWS = 64
"""Rows whose logits are computed together: more would read the weights less often but need more memory."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """`count` tokens of a prompt, from position `first` on, whose probabilities are to be reported.

    Each is scored by the row of the token before it; these rows of the step begin at `row`.
    """

    sequence: Sequence
    first: int
    count: int
    row: int

    @property
    def top(self) -> int:
        """Number of the most likely tokens to report beside each."""
        return self.sequence.request.prompt_logprobs or 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the R tokens of `chunks`.

    `logprobs`: [R, 1 + top] float32, the token's own first; `top_ids`: [R, top] int64; `ranks`: [R] int64,
    the number of tokens that are at least as likely as the token itself.
    """

    chunks: list[ScoredChunk]
    logprobs: Tensor
    top_ids: Tensor
    ranks: Tensor

    def to_host(self) -> "Scores":
        """Start copying to pinned host memory; whoever reads the copies must first wait for the device."""
        return replace(
            self,
            logprobs=self.logprobs.to("cpu", non_blocking=True),
            top_ids=self.top_ids.to("cpu", non_blocking=True),
            ranks=self.ranks.to("cpu", non_blocking=True),
        )


def scored_chunks(step: Step, rows: tuple[ChunkRows, ...]) -> list[ScoredChunk]:
    """Return the parts of a step's prompts to be scored; `rows`: the step's rows of each prompt chunk."""
    found = []
    for chunk, place in zip(step.told, rows, strict=True):
        sequence = chunk.sequence
        if sequence.request.prompt_logprobs is None or not sequence.unscored:
            continue
        count = min(chunk.end, len(sequence.request.prompt_ids) - 1) - chunk.start
        if count > 0:
            found.append(ScoredChunk(sequence, chunk.start + 1, count, place.start))
    return found


def stage_scores(staging: Staging, chunks: list[ScoredChunk]) -> None:
    """Stage the scoring rows and the tokens they score."""
    staging.integers(
        "scoring_rows", [row for each in chunks for row in range(each.row, each.row + each.count)]
    )
    staging.integers(
        "scored_tokens",
        [token for each in chunks for token in each.sequence.tokens[each.first : each.first + each.count]],
    )


def score(
    chunks: list[ScoredChunk], staged: Staged, hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> Scores:
    """Score what was staged.

    Args:
        chunks: what was staged.
        staged: the uploaded step.
        hidden: the step's hidden rows, [T, width].
        logits: turns [S, width] into logits [S, vocabulary] of any float dtype.
    """
    top = max(each.top for each in chunks)
    rows, tokens = staged.scoring_rows, staged.scored_tokens
    filling = (0, -len(rows) % SLICE_ROWS)
    slices = [
        _score_slice(hidden[some], scored, top, logits)
        for some, scored in zip(
            torch.split(pad(rows, filling), SLICE_ROWS),
            torch.split(pad(tokens, filling), SLICE_ROWS),
            strict=True,
        )
    ]
    logprobs, top_ids, ranks = (torch.cat(parts)[: len(rows)] for parts in zip(*slices, strict=True))
    return Scores(chunks, logprobs, top_ids, ranks)


def _score_slice(
    hidden: Tensor, tokens: Tensor, top: int, logits: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    raw = logits(hidden).float().log_softmax(dim=-1)
    likely, likely_ids = raw.topk(top, dim=-1)
    own = raw.gather(1, tokens[:, None])
    return torch.cat([own, likely], dim=1), likely_ids, (raw >= own).sum(dim=-1)


def with_scores(results: list[Sampled], scores: Scores) -> list[Sampled]:
    """Add the scores, which are on the host, to the results of the same step.

    Must be called once for each step, in order.
    """
    values, ids, ranks = scores.logprobs.tolist(), scores.top_ids.tolist(), scores.ranks.tolist()
    scored = {chunk.sequence for chunk in scores.chunks}
    by_sequence = {each.sequence: each for each in results if each.sequence in scored}
    at = 0
    for chunk in scores.chunks:
        sequence = chunk.sequence
        # Tokens computed again after a preemption were reported before.
        new = range(at + max(0, sequence.scored + 1 - chunk.first), at + chunk.count)
        at += chunk.count
        if not new:
            continue
        result = by_sequence.get(sequence) or Sampled(sequence)
        if result.fault is not None:
            continue
        if any(isnan(values[row][0]) for row in new):
            by_sequence[sequence] = Sampled.not_finite(sequence)
            continue
        tokens = sequence.tokens[chunk.first + chunk.count - len(new) : chunk.first + chunk.count]
        sequence.scored += len(new)
        prompt_logprobs = tuple(
            _ranked(token_logprobs(token, values[row], ids[row], chunk.top), ranks[row])
            for token, row in zip(tokens, new, strict=True)
        )
        by_sequence[sequence] = replace(result, prompt_logprobs=prompt_logprobs)
    with_others = [by_sequence.pop(each.sequence, each) for each in results]
    return with_others + list(by_sequence.values())


def _ranked(logprobs: TokenLogprobs, at_least_as_likely: int) -> TokenLogprobs:
    """Add the rank. Equally likely tokens rank in the order of `top`, so no two there share a rank."""
    places = [token_id for token_id, _ in logprobs.top]
    rank = places.index(logprobs.id) + 1 if logprobs.id in places else at_least_as_likely
    return replace(logprobs, rank=rank)
