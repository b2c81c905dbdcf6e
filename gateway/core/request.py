"""The request between the HTTP layer and the dialects.

Knows neither OpenAI's JSON (above) nor tensors (below). `field` and the like are names in the client's
request, kept for error messages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gateway.errors import InvalidRequestError
from wire.history import Role, Turn
from wire.sampling import Sampling

MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A call made by an earlier assistant message; its results refer to `id`.

    `arguments` is a JSON object as text, or what the model wrote in its place. Parsed, it would take twenty
    times the memory while it waits.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image in a message."""

    url: str
    """A data: URL of the file, such as PNG or JPEG, in base64."""
    at: int
    """It stands in front of this character of the message's content."""
    field: str = field(default="messages", compare=False)
    """Its name in the request."""

    @property
    def data(self) -> str:
        """The file as base64."""
        return self.url.partition(",")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the conversation. Content parts are joined, and `developer` has become `system`."""

    role: MessageRole
    content: str
    images: tuple[Image, ...] = ()
    """Those of a user's message, in their order."""
    calls: tuple[PastCall, ...] = ()
    """The calls of an assistant message, made after its content."""
    reasoning: str = ""
    """What an assistant message was thought out by, where the model's prompt has room for it."""
    answers: str | None = None
    """In a tool message: the id of the call whose result it is."""
    field: str = field(default="messages", compare=False)
    """Its name in the request."""


_BLANK_LINE = "\n\n"


@dataclass(slots=True)
class Draft:
    """A message of the conversation while its parts are collected; blank lines separate them."""

    role: MessageRole
    path: str
    """Its name in the request."""
    answers: str | None = None
    calls: dict[str, PastCall] = field(default_factory=dict)
    """By id."""
    reasoning: list[str] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    _parts: list[list[str]] = field(default_factory=lambda: [[]])
    """Pieces of text of each."""
    _length: int = 0
    """Of the content so far, in characters."""

    def begin(self) -> None:
        """Begin a part."""
        self._parts.append([])

    def add(self, text: str, images: Iterable[Image] = ()) -> None:
        """Add `text` to the part, and images whose places are those in `text`."""
        if text and self._length and not self._parts[-1]:
            self._length += len(_BLANK_LINE)
        self.images += (replace(image, at=self._length + image.at) for image in images)
        self._length += len(text)
        if text:
            self._parts[-1].append(text)

    def add_call(self, call: PastCall, path: str) -> None:
        """Add a call, and begin a part behind it.

        Raises:
            InvalidRequestError: its id, whose name in the request is `path`, is that of another one.
        """
        if call.id in self.calls:
            raise InvalidRequestError(f"{path} is that of a call before it.", param=path)
        self.calls[call.id] = call
        self.begin()

    def message(self) -> Message:
        """Return it, complete."""
        return Message(
            role=self.role,
            content=_BLANK_LINE.join("".join(pieces) for pieces in self._parts if pieces),
            images=tuple(self.images),
            calls=tuple(self.calls.values()),
            reasoning=_BLANK_LINE.join(filter(None, self.reasoning)),
            answers=self.answers,
            field=self.path,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    """Enforce the whole schema on the arguments; otherwise only what can be enforced."""
    place: int = field(default=0, compare=False)
    """Its index among the request's tools, of which perhaps not all are offered."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The choice of some tools: only these are offered."""

    names: frozenset[str]
    choice: Literal["auto", "required"]


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """The tools that the model may call, at least one, and which it must.

    `field`, `schema_field` and `choice_field` are the names in the request of the tools, of one tool's schema
    (`{}` is its place), and of the choice.
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
    """At least one."""
    offer: ToolOffer | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking`: only those that it reads."""


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


def images_in(prompt: Prompt) -> list[Image]:
    """Return all images of a prompt, in their order."""
    messages = prompt.messages if isinstance(prompt, Conversation) else ()
    return [image for message in messages for image in message.images]


def with_system(prompt: Prompt, text: str) -> Prompt:
    """Return `prompt` with a system message of `text` in front, unless it has one, or no messages at all."""
    match prompt:
        case Conversation(messages) if all(each.role != "system" for each in messages):
            return replace(prompt, messages=(Message(role="system", content=text), *messages))
        case Turns(history, role=role) if all(each.role != "system" for each in history) and role != "system":
            return replace(prompt, history=(Turn("system", text), *history))
    return prompt


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
    public_name: str | None = None
    """What the model is called outside, if not the same."""
    prompt: Prompt
    deadline: float
    """Of the event loop's clock, in seconds."""
    prompt_field: str | None = None
    """The prompt's name in the request, if it has several."""
    max_tokens_yields: bool = False
    """`max_tokens` is the gateway's default, not the client's: cut it to the context instead of refusing."""
    grammar: Grammar | None = None
    """None: the text is free."""
    stream: bool = False
    """False: the model sends all of the answer at once."""
    resumable: bool = False
    """The answer is to be read in a way that it can be resumed elsewhere if its server dies; needs a seed."""
    logits: bool = False
    """Report the logits of all tokens of the prompt, which is of ids, instead of an answer: `max_tokens` is
    0."""
    generated: tuple[tuple[int, ...] | None, ...] = ()
    """The tokens that each choice has already, and goes on after; None: it has ended. Empty: it is new."""
    adapter: str | None = None
    """The name of the LoRA adapter to apply to the model; None: none."""

    def grammar_field(self, tool: str | None = None, *, text: bool = False) -> str | None:
        """Return the name in the request of the grammar's source; None: the answer is free, or there are two.

        That of the schema of `tool`, if it is named, or of the grammar of the `text` beside calls.
        """
        offer = self.prompt.offer if isinstance(self.prompt, Conversation) else None
        if offer is None or offer.choice == "none":
            return None if self.grammar is None else self.grammar.field
        if text and self.grammar is not None:
            return self.grammar.field
        for each in offer.tools:
            if each.name == tool:
                return offer.schema_field.format(each.place)
        return offer.field if self.grammar is None or offer.choice != "auto" else None
