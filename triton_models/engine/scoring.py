"""Log-probabilities of prompts: how likely each of a prompt's tokens was to the model.

A prompt's hidden states go on to logits in the step that computes them, one slice of rows at a time, which
bounds the memory needed. All slices have the same size (the last one is padded), so that a device computes
only one shape. Steps without such requests do none of this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad

from triton_models.engine.models import ChunkRows
from triton_models.engine.sequence import Sequence, TokenLogprobs
from triton_models.engine.slots import Staged, Staging
from triton_models.engine.step import Sampled, Step, token_logprobs

SLICE_ROWS = 64
"""Rows whose logits are computed together: more would read the weights less often but need more memory."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`count` tokens of a prompt, from position `first` on, of which something is to be reported.

    The rows of the step from `row` on hold them.
    """

    sequence: Sequence
    first: int
    count: int
    row: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the R tokens behind those of `chunks`.

    `logprobs`: [R, 1 + top] float32, the token's own first; `top_ids`: [R, top] int64; `ranks`: [R] int64,
    the number of tokens that are at least as likely as the token itself.
    """

    chunks: list[PromptChunk]
    logprobs: Tensor
    top_ids: Tensor
    ranks: Tensor


def prompt_chunks(step: Step, rows: tuple[ChunkRows, ...], *, logits: bool) -> list[PromptChunk]:
    """Return the tokens of a step's prompts whose logits, or else next tokens' scores, are wanted.

    `rows`: its rows of each chunk.
    """
    found = []
    for chunk, place in zip(step.told, rows, strict=True):
        request = chunk.sequence.request
        wanted = request.logits if logits else request.prompt_logprobs is not None
        # The last token scores none of the prompt's.
        count = min(chunk.end, len(request.prompt_ids) - (not logits)) - chunk.start
        if wanted and count > 0 and chunk.sequence.unscored:
            found.append(PromptChunk(chunk.sequence, chunk.start, count, place.start))
    return found


def stage_scores(staging: Staging, chunks: list[PromptChunk]) -> None:
    """Stage the scoring rows and the tokens they score."""
    staging.integers(
        "scoring_rows", [row for each in chunks for row in range(each.row, each.row + each.count)]
    )
    staging.integers("scored_tokens", [token for each in chunks for token in _scored(each)])


def _scored(chunk: PromptChunk) -> list[int]:
    """Return the tokens that a chunk scores: each row the next one."""
    return chunk.sequence.tokens[chunk.first + 1 : chunk.first + 1 + chunk.count]


def score(
    chunks: list[PromptChunk], staged: Staged, hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> Scores:
    """Score what was staged.

    Args:
        chunks: what was staged.
        staged: the uploaded step.
        hidden: the step's hidden rows, [T, width].
        logits: turns [S, width] into logits [S, vocabulary] of any float dtype.
    """
    top = max(each.sequence.request.prompt_logprobs or 0 for each in chunks)
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
    """Add the scores, which are on the host, to the results of the same step; as `with_reports`."""
    values, ids, ranks = scores.logprobs.tolist(), scores.top_ids.tolist(), scores.ranks.tolist()

    def report(result: Sampled, chunk: PromptChunk, known: int, rows: range) -> Sampled:
        if any(isnan(values[row][0]) for row in rows):
            return Sampled.not_finite(chunk.sequence)
        top = chunk.sequence.request.prompt_logprobs or 0
        prompt_logprobs = tuple(
            _ranked(token_logprobs(token, values[row], ids[row], top), ranks[row])
            for token, row in zip(_scored(chunk)[known:], rows, strict=True)
        )
        return replace(result, prompt_logprobs=prompt_logprobs)

    return with_reports(results, scores.chunks, report)


def with_reports(
    results: list[Sampled],
    chunks: list[PromptChunk],
    report: Callable[[Sampled, PromptChunk, int, range], Sampled],
) -> list[Sampled]:
    """Add to the results of a step what was computed of its prompts.

    Must be called once for each step, in order: it counts what was reported.

    Args:
        results: of the step.
        chunks: of the same step.
        report: called with a result so far, a chunk, how many of its rows were reported before, and the
            numbers of its other rows among those of all chunks; returns the result with these, or a fault.
    """
    sequences = {chunk.sequence for chunk in chunks}
    by_sequence = {each.sequence: each for each in results if each.sequence in sequences}
    end = 0
    for chunk in chunks:
        end += chunk.count
        sequence = chunk.sequence
        # Tokens computed again after a preemption were reported before.
        known = min(max(0, sequence.scored - chunk.first), chunk.count)
        result = by_sequence.get(sequence) or Sampled(sequence)
        if known == chunk.count or result.fault is not None:
            continue
        result = report(result, chunk, known, range(end - chunk.count + known, end))
        by_sequence[sequence] = result
        if result.fault is None:
            sequence.scored += chunk.count - known
    with_others = [by_sequence.pop(each.sequence, each) for each in results]
    return with_others + list(by_sequence.values())


def _ranked(logprobs: TokenLogprobs, at_least_as_likely: int) -> TokenLogprobs:
    """Add the rank. Equally likely tokens rank in the order of `top`, so no two there share a rank."""
    places = [token_id for token_id, _ in logprobs.top]
    rank = places.index(logprobs.id) + 1 if logprobs.id in places else at_least_as_likely
    return replace(logprobs, rank=rank)
