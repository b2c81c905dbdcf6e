"""The events of an answer: accepted, alive, more reasoning, text and tool calls in the model's own order.

Knows neither OpenAI's JSON (above) nor tensors (below).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from wire.meta import Segment


class Call(Struct, frozen=True):
    """A call of a tool. `arguments` is text that should be a JSON object; the model may write other text."""

    name: str
    arguments: str


class CallPart(Struct, frozen=True):
    """Part of a call. One with a name begins a call; one without continues the last call's arguments."""

    name: str | None
    arguments: str


def joined_calls(parts: Iterable[CallPart]) -> list[Call]:
    """Join `parts` into whole calls; the first part must have a name."""
    calls: list[Call] = []
    for part in parts:
        if part.name is not None:
            calls.append(Call(part.name, part.arguments))
        else:
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return calls


class Reasoning(Struct, frozen=True):
    """Part of the reasoning that a model writes before its answer."""

    text: str


Piece = str | CallPart | Reasoning
"""Text, with everything that belongs to the chat format removed, or part of a call, or of the reasoning."""


def joined_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the same answer in as few pieces as possible, without empty texts."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str):
            if isinstance(last, str):
                joined[-1] = last + piece
            elif piece:
                joined.append(piece)
        elif isinstance(piece, Reasoning):
            if isinstance(last, Reasoning):
                joined[-1] = Reasoning(last.text + piece.text)
            else:
                joined.append(piece)
        elif piece.name is None and isinstance(last, CallPart):
            joined[-1] = CallPart(last.name, last.arguments + piece.arguments)
        else:
            joined.append(piece)
    return tuple(joined)


def text_in(pieces: Iterable[Piece]) -> str:
    """Return the text in `pieces`, without reasoning and calls."""
    return "".join([piece for piece in pieces if isinstance(piece, str)])


FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = str | int
"""The request's own stop string or token id that ended a choice; the format's own stop ids do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The upstream validated and queued the request: from here on the client may get status 200."""

    prompt_tokens: int
    """Of all prompts."""
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    """For each prompt, if requested."""
    whole: bool = False
    """All of an answer comes with its end, though a stream was requested: nobody knows when tokens came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The upstream is alive: the request waits, is in prefill, or its text is being held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the most likely tokens at its position."""

    id: int
    token: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token's natural-log probability and the most likely alternatives."""

    id: int
    token: str
    utf8: bytes
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """The same of a prompt's token, behind those before it; None of the first, which nothing is before.

    `utf8` is what the token adds to the prompt's text. `rank`, where it was asked for, is its place among
    `top`; below them, how many tokens are at least as likely, itself among them.
    """

    id: int
    token: str
    utf8: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...]
    rank: int | None = None


class Timings(Struct, frozen=True, kw_only=True):
    """Where a request's time went, in milliseconds; None: there is no such time, or nobody told it.

    `queued_ms + engine_queued_ms <= first_token_ms`, and `first_token_ms + generation_ms <= server_ms`.
    """

    queued_ms: float | None
    """Waiting for the gateway's admission."""
    engine_queued_ms: float | None
    """On the engine's waiting list, until its first step for any choice; only some engines tell."""
    first_token_ms: float | None
    """From the request's arrival to its first token's."""
    generation_ms: float | None
    """From the first token to the last one, of all choices."""
    server_ms: float
    """From the request's arrival until these numbers were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of the whole request: each prompt once, and the tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """How many of the completion's are reasoning; None: the model's answers have none apart."""
    queue_s: float | None = None
    """Seconds on the engine's waiting list, until its first step for any choice; None: it does not tell."""
    timings: Timings | None = None
    """If requested; those of the HTTP request, added on its way to the client."""


class LogitsPart(Struct, frozen=True):
    """The logits of a prompt's tokens from place `first` on.

    `values` are float32 in little-endian order, `vocabulary` numbers for each token, which rate what may
    follow it. An answer that was begun anew elsewhere may repeat some.
    """

    first: int
    vocabulary: int
    values: bytes


class Delta(Struct, frozen=True, kw_only=True):
    """More of the answer, perhaps without text: tokens that are held back are counted as well.

    A struct, because one is made for nearly every token, in a quarter of a frozen dataclass's time.

    The last delta of a choice has `finish_reason`; the last of the request also has `usage`.
    """

    pieces: tuple[Piece, ...] = ()
    tokens: int
    index: int = 0
    token_ids: tuple[int, ...] | None = None
    """The ids of those tokens, if requested, including the one that stopped the answer."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Those of tokens of the text, if requested: of this delta's or of the text before it. In a delta that
    has them, the text comes before the calls, so that they are of one text. Calls have none."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Those of the prompt's next tokens, in one or several deltas before the choice's first token."""
    logits: LogitsPart | None = None
    """Those of the prompt's next tokens, if requested."""
    segments: tuple[Segment, ...] = ()
    """Only in answers to `Turns`: where segments begin, as offsets into this delta's text, in code points."""
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    usage: Usage | None = None

    @property
    def counts_only(self) -> bool:
        """Whether it only tells of tokens whose text comes later."""
        return not (self.pieces or self.prompt_logprobs or self.segments or self.finish_reason)

    @property
    def text(self) -> str:
        """The text in it, without reasoning and calls."""
        pieces = self.pieces
        if len(pieces) == 1 and isinstance(pieces[0], str):
            return pieces[0]  # the common case
        return text_in(pieces)

    @property
    def reasoning(self) -> str:
        """The reasoning in it."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, Reasoning)])

    @property
    def calls(self) -> tuple[CallPart, ...]:
        """The parts of calls in it."""
        return tuple([piece for piece in self.pieces if isinstance(piece, CallPart)])


Event = Accepted | Heartbeat | Delta
