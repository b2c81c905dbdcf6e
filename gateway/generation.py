"""The types between the HTTP layer and the dialects: one request type, and one stream of events.

They know neither OpenAI's JSON (above) nor tensors (below). `field` and the like are names in the client's
request, kept for error messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from gateway.pieces import CallPart, Piece
from gateway.tracing import Headers
from wire.history import Role, Turn
from wire.meta import Segment
from wire.sampling import Sampling

FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = str | int
"""The request's own stop string or token id that ended a choice; the format's own stop ids do not count."""
MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A call made by an earlier assistant message; its results refer to `id`.

    `arguments` is a JSON object as text: parsed, it would take twenty times the memory while it waits.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the conversation. Content parts are joined, and `developer` has become `system`."""

    role: MessageRole
    content: str
    calls: tuple[PastCall, ...] = ()
    """The calls of an assistant message, made after its content."""
    answers: str | None = None
    """In a tool message: the id of the call whose result it is."""
    field: str = field(default="messages", compare=False)
    """Its name in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    """Enforce the whole schema on the arguments; otherwise only what can be enforced."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """The tools that the model may call, at least one, and which it must.

    `field`, `schema_field` and `choice_field` are the names in the request of the tools, of one tool's schema
    (`{}` is its index), and of the choice.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice = "auto"
    """A named tool is called exactly once; `required` means at least one call."""
    single: bool = False
    """At most one call in the answer."""
    field: str = "tools"
    schema_field: str = "tools.{}.function.parameters"
    choice_field: str = "tool_choice"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt of messages, rendered in the model's own chat format."""

    messages: tuple[Message, ...]
    offer: ToolOffer | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation in the chat format's own turns, as legacy clients send it.

    The answer comes raw: `Delta.pieces` is its text as the model wrote it, `Delta.segments` says where role
    tokens opened segments.
    """

    history: tuple[Turn, ...]
    text: str
    role: Role = "user"
    """Who speaks in `text`, the last turn."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """A prompt to be continued exactly as given."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt of the model's own token ids, at least one, to be continued exactly as given."""

    ids: tuple[int, ...]


Prompt = Conversation | Turns | PlainText | TokenIds

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A constraint on the whole text of the answer, enforced while it is sampled.

    `text` is the schema as JSON, the regular expression, the choices as a JSON list, or the grammar in Lark's
    or GBNF's notation; for `json_object` it is empty. `field` is its name in the request.
    """

    kind: GrammarKind
    text: str = ""
    field: str


class Generation(Sampling, frozen=True, kw_only=True):
    """A validated request for text: what is to be answered, and how it is sampled (`wire.sampling`)."""

    request_id: str
    model: str
    prompt: Prompt
    deadline: float
    """Of the event loop's clock, in seconds."""
    headers: Headers = ()
    """Further headers of the call upstream: the trace context."""
    prompt_field: str | None = None
    """The prompt's name in the request, if it has several."""
    max_tokens_yields: bool = False
    """`max_tokens` is the gateway's default, not the client's: cut it to the context instead of refusing."""
    grammar: Grammar | None = None
    """None: the text is free."""
    stream: bool = False
    """False: the model sends all of the answer at once."""

    def grammar_field(self, tool: str | None = None, *, text: bool = False) -> str | None:
        """Return the name in the request of the grammar's source; None: the answer is free, or there are two.

        Args:
            tool: the name of the tool whose schema is meant, if it is a tool's.
            text: the grammar of the text beside calls is meant.
        """
        offer = self.prompt.offer if isinstance(self.prompt, Conversation) else None
        if offer is None or offer.choice == "none":
            return None if self.grammar is None else self.grammar.field
        if text and self.grammar is not None:
            return self.grammar.field
        for at, each in enumerate(offer.tools):
            if each.name == tool:
                return offer.schema_field.format(at)
        return offer.field if self.grammar is None or offer.choice != "auto" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The upstream validated and queued the request: from here on the client may get status 200."""

    prompt_tokens: int
    """Of all prompts."""
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    """For each prompt, if requested."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of the whole request: each prompt once, and the tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


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
    segments: tuple[Segment, ...] = ()
    """Only in answers to `Turns`: where segments begin, as offsets into this delta's text, in code points."""
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The text in it, without the calls."""
        pieces = self.pieces
        if len(pieces) == 1 and isinstance(pieces[0], str):
            return pieces[0]  # the common case
        return "".join([piece for piece in pieces if isinstance(piece, str)])

    @property
    def calls(self) -> tuple[CallPart, ...]:
        """The parts of calls in it."""
        return tuple([piece for piece in self.pieces if isinstance(piece, CallPart)])


Event = Accepted | Heartbeat | Delta
