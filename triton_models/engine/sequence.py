"""A request, what it is answered with, and its states in the engine."""

import enum
import secrets
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from triton_models.engine.drafts import Drafter
from triton_models.engine.sampling import SamplingParams
from triton_models.errors import InvalidRequestError, PromptTooLongError

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    """This request could not be computed; it could not elsewhere."""
    FAULT = "fault"
    """The engine failed under it: another one, or this one once it is loaded again, may compute it."""
    SHUTDOWN = "shutdown"
    MASK = "mask"
    """Its token mask failed: an error of this request only."""


Fault = tuple[FinishReason, str]
"""How a request ends that fails, and the message for its client."""


class SequenceState(enum.Enum):
    """WAITING -> PREFILL -> DECODE -> FINISHED; preemption leads back to WAITING, any state to FINISHED."""

    WAITING = enum.auto()
    """Holds no KV blocks: not started yet, or preempted."""
    PREFILL = enum.auto()
    """Its known tokens (prompt, and after a preemption what it generated) are being computed."""
    DECODE = enum.auto()
    """All tokens but the newest (which may be in flight) are in the KV cache; each step adds one."""
    FINISHED = enum.auto()


_NEXT = {
    SequenceState.WAITING: {SequenceState.PREFILL, SequenceState.FINISHED},
    SequenceState.PREFILL: {SequenceState.DECODE, SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.DECODE: {SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.FINISHED: set[SequenceState](),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Token ids to continue.

    `priority`: lower runs first, equal ones in order of arrival. `deadline`: the time in monotonic seconds at
    which the request is given up, waiting or running; None: never. `prefix_cache` False: its keys and values
    are not shared. `generated_ids`: tokens that were sampled for it elsewhere; it goes on after them as after
    a preemption. `prompt_logprobs`: report the log-probabilities of the prompt's tokens, each with those of
    this many most likely ones; for this the whole prompt is computed, whatever is cached. None: none.
    `logits`: the same for the logits of all of the prompt's tokens; not both.
    `since`: the time in monotonic seconds at which the request came that this one goes on for: it has that
    one's rank, and is not refused for want of a place. None: it is new. `shares_tail`: others are likely to
    begin with the same tokens, so a block that these do not fill is copied for it, not taken.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    generated_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline: float | None = None
    prefix_cache: bool = True
    prompt_logprobs: int | None = None
    logits: bool = False
    since: float | None = None
    shares_tail: bool = False


def says_context(max_context: int) -> str:
    """Begin as OpenAI and vLLM do: clients look for these words, and shorten the conversation."""
    return f"This model's maximum context length is {max_context} tokens."


def check_length(prompt_tokens: int, max_context: int) -> None:
    """Refuse a prompt without tokens, or one that leaves no room in the context.

    Raises:
        PromptTooLongError: it does not.
        InvalidRequestError: an empty prompt.
    """
    if prompt_tokens == 0:
        raise InvalidRequestError("the prompt has no tokens")
    if prompt_tokens > max_context - 1:
        raise PromptTooLongError(
            f"{says_context(max_context)}"
            f" However, the prompt has {prompt_tokens} tokens, and the answer needs one."
        )


def check_request(request: Request, *, max_context: int, vocabulary: int) -> None:
    """Refuse a request that the engine could never finish.

    Raises:
        PromptTooLongError: prompt and answer together exceed `max_context` tokens.
        InvalidRequestError: an empty prompt, a token id outside the vocabulary, or an answer that is complete
            already.
    """
    sampling = request.sampling
    length = len(request.prompt_ids)
    check_length(length, max_context)
    if sampling.max_tokens is not None and length + sampling.max_tokens > max_context:
        raise PromptTooLongError(
            f"{says_context(max_context)} However, you requested {length + sampling.max_tokens} tokens"
            f" ({length} in the prompt, {sampling.max_tokens} in the completion)."
            " Please reduce the prompt or max_tokens."
        )
    generated = len(request.generated_ids)
    most = max_context - length if sampling.max_tokens is None else sampling.max_tokens
    if generated >= most:
        raise InvalidRequestError(f"generated has {generated} tokens, and the answer ends at {most}")
    if not sampling.stop_token_ids.isdisjoint(request.generated_ids):
        raise InvalidRequestError("generated: the answer ended within these tokens")
    ids = {
        "prompt": request.prompt_ids,
        "generated": request.generated_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
    }
    for name, values in ids.items():
        if values and not (min(values) >= 0 and max(values) < vocabulary):
            raise InvalidRequestError(f"{name} has an id outside the vocabulary of {vocabulary}")


# What a step creates one of for each sequence is a struct: a frozen dataclass takes ten times as long to
# create, and the garbage collector looks at it. None of them is in a reference cycle.
class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Natural-log probabilities at one position, of the raw logits: `SamplingParams` are not applied."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely (id, log-probability) pairs, as many as requested, best first."""
    rank: int | None = None
    """For prompt tokens only: the place in `top`, from 1; if it is not there, the number of tokens that are
    at least as likely, itself included."""


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """The raw logits of a prompt's tokens from position `first` on."""

    first: int
    values: "Tensor"
    """[tokens, vocabulary] float32, on the host."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step gave a request: a token, its end, something about its prompt, or several of these.

    The token that ended the request (a stop id) is here too, with `finish_reason` STOP.
    """

    request_id: str
    prompt_tokens: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt's next tokens: each is reported once, in order. The first token has none, since it
    follows nothing. All are reported by the time the answer's first token is."""
    prompt_logits: PromptLogits | None = None
    """Those of the prompt's next tokens: each is reported once, in order, and all by the first token."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """What went wrong, in words for the client."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache instead of computed."""
    queue_seconds: float | None = None
    """With the first token sampled here: seconds from arrival until the first step that worked on the
    request."""
    time_to_first_token: float | None = None
    """With the first token sampled here: seconds from arrival."""


PRIORITY_S = 30.0
"""Seconds of waiting that are worth one level of priority."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine: its tokens, its KV blocks and its state."""

    request: Request
    _: KW_ONLY
    arrival: int
    """Numbers requests in the order they came."""
    arrived_at: float
    """In monotonic seconds."""
    max_tokens: int
    """The request's, or else what its prompt leaves of the context."""

    state: SequenceState = SequenceState.WAITING
    masked: bool = field(init=False)
    rank: tuple[float, int] = field(init=False)
    """Lower ranks run first. Waiting improves priority, yet the order of two sequences never changes."""
    seed: int = field(init=False)
    tokens: list[int] = field(init=False)
    """The prompt, and the sampled tokens that are known, wherever they were sampled."""
    max_length: int = field(init=False)
    computed: int = 0
    """Tokens whose keys and values are in the cache once every step launched so far has run."""
    in_flight: int = 0
    """Tokens sampled by launched steps and not known to the host yet: 0 or 1 when a step is scheduled."""
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    """Row of the device's state tables, 0 to `max_running` - 1; None unless running."""
    found: list[int] = field(default_factory=list)
    """The blocks of its beginning that were in the cache when they were last looked for."""
    found_keys: list[bytes] = field(default_factory=list)
    """By what the cache knew them. If it has another key for one, that block was given away meanwhile."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in the cache when it was first admitted."""
    scored: int = 0
    """Tokens of the prompt of which was reported what was requested: log-probabilities, which the first does
    not have and is not counted for, or logits."""
    scheduled_at: float | None = None
    times_told: bool = False
    """Whether its first token sampled here was output, with the times that it took."""
    drafter: Drafter = field(init=False)
    """Guesses at its next tokens."""
    drafted: bool = False
    """Whether its newest tokens were guesses, so that the device does not know yet how many were right."""

    def __post_init__(self) -> None:
        """Derive the rest."""
        request = self.request
        mask = request.sampling.mask
        self.masked = mask is not None
        self.rank = (self.arrived_at + PRIORITY_S * request.priority, self.arrival)
        self.seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        self.tokens = [*request.prompt_ids, *request.generated_ids]
        self.max_length = len(request.prompt_ids) + self.max_tokens
        self.drafter = Drafter(mask, request.sampling.stop_token_ids)

    @property
    def generated(self) -> int:
        """Number of sampled tokens that are known."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def unscored(self) -> bool:
        """Whether requested log-probabilities or logits of the prompt are still to be reported."""
        request = self.request
        if request.logits:
            return self.scored < len(request.prompt_ids)
        return request.prompt_logprobs is not None and self.scored < len(request.prompt_ids) - 1

    @property
    def length(self) -> int:
        """Number of tokens, including those in flight."""
        return len(self.tokens) + self.in_flight

    def append(self, token_id: int) -> None:
        """Append the value of the oldest token in flight, or the one after a guess that was right."""
        self.tokens.append(token_id)
        if self.in_flight:
            self.in_flight -= 1
        elif self.state is SequenceState.DECODE:
            # The step has computed the guess, too. (What a preempted sequence has computed is lost.)
            self.computed += 1

    def start_over(self) -> None:
        """Go back to WAITING with only the known tokens: what was computed is lost."""
        if self.state is not SequenceState.WAITING:
            self.move_to(SequenceState.WAITING)
        self.blocks = []
        self.slot = None
        self.computed = self.in_flight = 0
        self.drafted = False

    def move_to(self, state: SequenceState) -> None:
        """Change the state.

        Raises:
            RuntimeError: there is no such transition; a bug in the engine.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.request.request_id}: {self.state.name} does not lead to {state.name}")
        self.state = state


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """`count` tokens of a sequence, from position `start` on, that are computed in a step.

    `samples`: whether they include the sequence's newest token, so that the step samples the next one. This
    is decided when the step is scheduled, since the sequence grows afterwards. `guesses`: the last of the
    tokens, if they are not the sequence's but guesses at what comes next; the step samples after each.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    guesses: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Tokens of the sequence, guesses included, that are in the KV cache after the step."""
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed."""
        return [*self.sequence.tokens[self.start : self.end], *self.guesses]
