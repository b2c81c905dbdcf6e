"""A step's life: the work chosen for it, what the device does, and what comes back."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from triton_models.engine.sampler import PlainRules, SamplerOutputs
from triton_models.engine.sequence import (
    Chunk,
    Fault,
    FinishReason,
    PromptLogits,
    Sequence,
    SequenceState,
    TokenLogprobs,
)
from triton_models.engine.slots import Staged

if TYPE_CHECKING:
    from triton_models.engine.logits import LogitsRows
    from triton_models.engine.scoring import Scores


@dataclass(slots=True, eq=False)
class Step:
    """One step: scheduled, begun, sampled and collected, each in the order of scheduling.

    The scheduler fills in the work, and the runner the rest.
    """

    decodes: list[Chunk] = field(default_factory=list)
    """Decoding sequences with one token each, which the device knows."""
    drafts: list[Chunk] = field(default_factory=list)
    """Decoding sequences with guesses, or without but after guesses: the host tells their tokens."""
    prefills: list[Chunk] = field(default_factory=list)
    """Chunks of prompts."""
    new_blocks: list[int] = field(default_factory=list)
    """Allocated for the step; they hold stale values."""
    logits_rows: int = 0
    """Tokens of the prompts whose logits are reported."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks, and allocated ones that get what these hold before anything else is done."""
    preemptions: int = 0
    scheduled_at: float = 0.0
    """When its scheduling began, in seconds of `time.perf_counter`."""

    # Once it is begun, so that the forward pass is queued on the device, but not the sampling:
    sampling: list[Sequence] = field(default_factory=list)
    """The sequence of each row that samples: the decodes', the drafts', then those whose prompts end here.
    One with guesses has a row for its newest token and one for each guess."""
    followed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The rows among these that follow a guess: how many of its sequence's rows are before, and the guess."""
    scores: "Scores | None" = None
    """Log-probabilities of prompts, if any are requested."""
    prompt_logits: "LogitsRows | None" = None
    """Logits of prompts, if any are requested."""

    # Only until it is sampled: what this needs, above all the logits, must not outlive it on the device.
    staged: Staged | None = None
    logits: Tensor | None = None
    """[S, vocabulary] of the rows that sample, and of padding rows behind them."""
    captured: PlainRules | None = None
    """What is heeded by the graph that samples, too; None: there is none."""

    # Once it is sampled:
    outputs: SamplerOutputs | None = None
    mask_faults: dict[Sequence, Fault] = field(default_factory=dict)
    done: torch.cuda.Event | None = None
    """None: the device has finished."""

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk, in the order of the step's rows."""
        return self.decodes + self.drafts + self.prefills

    @property
    def told(self) -> list[Chunk]:
        """The chunks whose tokens the host tells, all but the decodes."""
        return self.drafts + self.prefills

    @property
    def masks_wait(self) -> bool:
        """Whether a token mask must be told a token that is in flight before it can be asked for the next."""
        return any(chunk.sequence.masked and chunk.sequence.in_flight for chunk in self.decodes)

    def advance(self) -> None:
        """Record that the step was launched: steps launched later find its keys and values."""
        for chunk in self.decodes + self.drafts:
            sequence = chunk.sequence
            # Guesses count once they turn out right: `Sequence.append`.
            sequence.computed += 1
            sequence.in_flight += 1
        for chunk in self.prefills:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.samples:
                sequence.in_flight += 1
                sequence.move_to(SequenceState.DECODE)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """A sequence's next token, or why there is none; or what was requested of its prompt; or both."""

    sequence: Sequence
    token_id: int | None = None
    """None: the step did not sample for it, or there is a `fault`."""
    logprobs: TokenLogprobs | None = None
    fault: Fault | None = None
    invalid: bool = False
    """The model's output is not finite, so what it wrote to the KV cache cannot be trusted either."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """As in `TokenOutput`."""
    prompt_logits: PromptLogits | None = None
    """As in `TokenOutput`."""

    @classmethod
    def not_finite(cls, sequence: Sequence) -> "Sampled":
        """Return what comes of an output that is not finite."""
        return cls(sequence, fault=(FinishReason.ERROR, "the model's output is not finite"), invalid=True)


def rows_that_sample(chunks: list[Chunk]) -> tuple[list[Sequence], dict[int, tuple[int, int]]]:
    """Return `Step.sampling` and `Step.followed` of a step with these chunks."""
    sampling: list[Sequence] = []
    followed: dict[int, tuple[int, int]] = {}
    for chunk in chunks:
        if chunk.samples:
            sampling.append(chunk.sequence)
            for before, guess in enumerate(chunk.guesses, 1):
                followed[len(sampling)] = before, guess
                sampling.append(chunk.sequence)
    return sampling, followed


def sampled_tokens(step: Step, outputs: SamplerOutputs) -> list[Sampled]:
    """Match a step's outputs, which are on the host, with the sequences that it sampled for.

    What was sampled after a wrong guess is left out: the sequence goes on differently. `GuessedRows.right` is
    the same rule on the device.
    """
    tokens, finite, allowed = outputs.status.tolist()
    logprobs = _logprobs(step.sampling, tokens, outputs)
    followed, faults = step.followed, step.mask_faults
    results = []
    right = True
    for row, sequence in enumerate(step.sampling):
        # A row that allows nothing had no mask, or fails again as the next step's first row.
        right = row not in followed or (right and bool(allowed[row]) and tokens[row - 1] == followed[row][1])
        if not right:
            continue
        if faults and (fault := faults.get(sequence)) is not None:
            results.append(Sampled(sequence, fault=fault, invalid=not finite[row]))
        elif not finite[row]:
            results.append(Sampled.not_finite(sequence))
        elif not allowed[row]:
            results.append(Sampled(sequence, fault=(FinishReason.ERROR, "no token is allowed here")))
        else:
            results.append(Sampled(sequence, tokens[row], logprobs.get(row)))
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
