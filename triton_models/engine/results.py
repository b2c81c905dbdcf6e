"""Turns what the device sampled into the results of each sequence."""

from dataclasses import dataclass

from triton_models.engine.masks import MaskFault
from triton_models.engine.sampler import SamplerOutputs
from triton_models.engine.sequence import FinishReason, Sequence, TokenLogprobs, TokenOutput

NOT_FINITE = "the model's output is not finite"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence's next token, or why there is none; or log-probabilities of its prompt; or both."""

    sequence: Sequence
    token_id: int | None
    """None: the step did not sample for it."""
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    reason: FinishReason = FinishReason.ERROR
    """The finish reason if there is an `error`."""
    spoilt: bool = False
    """The model's output is not finite, so what it wrote to the KV cache cannot be trusted either."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """See `TokenOutput`."""


def sampled_tokens(
    sampling: list[Sequence], outputs: SamplerOutputs, mask_errors: dict[str, MaskFault]
) -> list[Sampled]:
    """Match a step's outputs, which are on the host, with the sequences that it sampled for."""
    tokens, finite, allowed = outputs.status.tolist()
    logprobs = _logprobs(sampling, tokens, outputs)
    results = []
    for row, sequence in enumerate(sampling):
        reason, error = mask_errors.get(sequence.request.request_id, (FinishReason.ERROR, None))
        if error is None and not finite[row]:
            error = NOT_FINITE
        if error is None and not allowed[row]:
            error = "no token is allowed here"
        results.append(
            Sampled(sequence, tokens[row], logprobs.get(row), error, reason, spoilt=not finite[row])
        )
    return results


def _logprobs(
    sampling: list[Sequence], tokens: list[int], outputs: SamplerOutputs
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that requested them."""
    if outputs.logprobs is None or outputs.top_ids is None:
        return {}
    rows = [row for row, each in enumerate(sampling) if each.request.sampling.logprobs is not None]
    found = {}
    for row, values, ids in zip(rows, outputs.logprobs.tolist(), outputs.top_ids.tolist(), strict=True):
        wanted = sampling[row].request.sampling.logprobs or 0
        found[row] = token_logprobs(tokens[row], values, ids, wanted)
    return found


def token_logprobs(token_id: int, values: list[float], ids: list[int], wanted: int) -> TokenLogprobs:
    """Return a token's log-probabilities.

    Args:
        token_id: the token.
        values: its own log-probability, and those of the most likely tokens, best first.
        ids: the ids of these most likely tokens.
        wanted: how many of them are reported.
    """
    return TokenLogprobs(
        id=token_id, logprob=values[0], top=tuple(zip(ids[:wanted], values[1 : wanted + 1], strict=True))
    )


def token_output(
    sequence: Sequence, sampled: Sampled | None, reason: FinishReason | None, error: str | None, *, now: float
) -> TokenOutput:
    """Return a step's output for a sequence; `now`: in monotonic seconds."""
    queue_seconds = time_to_first_token = None
    if sampled is not None and sequence.generated == 1 and sequence.scheduled_at is not None:
        queue_seconds = sequence.scheduled_at - sequence.arrived_at
        time_to_first_token = now - sequence.arrived_at
    return TokenOutput(
        request_id=sequence.request.request_id,
        prompt_tokens=len(sequence.request.prompt_ids),
        token_id=None if sampled is None else sampled.token_id,
        logprobs=None if sampled is None else sampled.logprobs,
        prompt_logprobs=() if sampled is None else sampled.prompt_logprobs,
        finish_reason=reason,
        error=error,
        cached_tokens=sequence.cached_tokens or 0,
        queue_seconds=queue_seconds,
        time_to_first_token=time_to_first_token,
    )
