"""What the HTTP layer and the dialects say to each other: one request type, one stream of events.

Nothing here knows OpenAI's JSON (above) or tensors (below).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from gateway.pieces import CallPart, Piece
from gateway.tracing import Headers

FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = str | int
"""The request's own stop string or token id that ended a choice; the format's end of an answer is none."""
MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A call that an assistant message made; its results name it by `id`.

    `arguments` is a JSON object, as text: as objects it would take twenty times the memory while it waits.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the conversation; content arrays are joined to text and `developer` is `system` here."""

    role: MessageRole
    content: str
    calls: tuple[PastCall, ...] = ()
    """Of an assistant message, made after its content."""
    answers: str | None = None
    """Of a tool message: the id of the call whose result it is."""
    field: str = field(default="messages", compare=False)
    """What the request calls it, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    """Every call's arguments obey the schema, all of it; else as far as that can be enforced."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """The tools that the model may use, at least one, and how it has to.

    `field`, `schema_field` and `choice_field` are what the request calls them, the schema of the tool at a
    place (`{}`), and the choice, for errors.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice = "auto"
    """A named one is called once, a required one at least once."""
    single: bool = False
    """At most one call in the answer."""
    field: str = "tools"
    schema_field: str = "tools.{}.function.parameters"
    choice_field: str = "tool_choice"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt of messages, for the model's own chat format to arrange."""

    messages: tuple[Message, ...]
    offer: ToolOffer | None = None


@dataclass(frozen=True, slots=True)
class PlainText:
    """A prompt to be continued as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt of the model's own token ids, at least one, to be continued as they stand."""

    ids: tuple[int, ...]


Prompt = Conversation | PlainText | TokenIds

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole text of the answer is held to while it is sampled.

    `text` is the schema as JSON, the regular expression, the choices as a JSON list, or the grammar in Lark's
    or GBNF's notation; of any JSON object it is empty. `field` is what the request calls it, for errors.
    """

    kind: GrammarKind
    text: str = ""
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A validated request for text. Ranges were checked by the HTTP layer."""

    request_id: str
    model: str
    prompt: Prompt
    deadline: float
    """Of the event loop's clock, in seconds."""
    headers: Headers = ()
    """Of the call upstream, beside the request's id: its place in a trace."""

    prompt_field: str | None = None
    """What the request calls the prompt, for errors; None where there can be no doubt."""
    n: int = 1
    """Choices: answers to the one prompt, each sampled by itself."""
    max_tokens: int | None = None
    """New tokens of each choice, perhaps none; None: what is left of the context."""
    max_tokens_yields: bool = False
    """The bound is not the client's: where the context has no room for it, what is left bounds the answer."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    """0 keeps every token."""
    repetition_penalty: float = 1.0
    """Of tokens in prompt or answer; 1 does nothing."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Of the first choice; each further one's is one higher. None: each draws its own."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    """What stopped a choice, a stop string or the text of a stop id, ends its text."""
    show_special: bool = False
    """Special tokens of the answer are text, by their names; none of them opens a segment then."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Number of alternatives reported beside each sampled token; None: no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, with each choice."""
    prompt_ranks: bool = False
    """With them, each token's rank."""
    grammar: Grammar | None = None
    """None: the text is free."""
    echo: bool = False
    """Each choice's text begins with the prompt's. For text and ids only."""
    stream: bool = False
    """False lets the model send the whole answer at once."""
    return_token_ids: bool = False
    """Report the ids of the prompt and of the answer."""
    priority: int = 0

    def grammar_field(self, tool: str | None = None) -> str | None:
        """Return what the request calls that which the answer is held to; None: it is free, or there are two.

        Args:
            tool: the name of the one whose schema is meant, where it is one's.
        """
        offer = self.prompt.offer if isinstance(self.prompt, Conversation) else None
        if offer is None or offer.choice == "none":
            return None if self.grammar is None else self.grammar.field
        for at, each in enumerate(offer.tools):
            if each.name == tool:
                return offer.schema_field.format(at)
        return offer.field if self.grammar is None or offer.choice != "auto" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The upstream validated and queued the request: from here the client may be told 200."""

    prompt_tokens: int
    """Of all prompts."""
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    """Of each prompt, where they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The upstream is alive and at work (waiting, in prefill, or holding text back)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    id: int
    token: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token's natural-log probability and the most likely alternatives."""

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
    """Token counts of the whole request: each prompt once, and what all choices have."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Delta(Struct, frozen=True, kw_only=True):
    """More of the answer: there may be nothing to show while `tokens` are counted.

    A struct since one is made for nearly every token, in a quarter of a frozen dataclass's time.

    The last delta of a choice has `finish_reason`; the last of the request also has `usage`.
    """

    pieces: tuple[Piece, ...] = ()
    tokens: int
    index: int = 0
    token_ids: tuple[int, ...] | None = None
    """Of those tokens, where they were asked for; the one that stopped the answer is among them."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Of the next tokens of the choice's prompt, in one or several deltas, all before its first token."""
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The text in it, without what is between."""
        pieces = self.pieces
        if len(pieces) == 1 and isinstance(pieces[0], str):
            return pieces[0]  # as nearly always
        return "".join([piece for piece in pieces if isinstance(piece, str)])

    @property
    def calls(self) -> tuple[CallPart, ...]:
        """What came of calls in it."""
        return tuple([piece for piece in self.pieces if isinstance(piece, CallPart)])


Event = Accepted | Heartbeat | Delta
