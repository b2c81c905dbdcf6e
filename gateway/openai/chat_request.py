"""`/v1/chat/completions`: the request and its messages, as OpenAI defines them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import AfterValidator, Field, Tag, ValidationInfo, model_validator

from gateway.chat.conversation import call_rules
from gateway.core.request import Conversation, Message, MessageRole, PastCall, ToolOffer
from gateway.errors import InvalidRequestError
from gateway.openai.document import (
    Content,
    Items,
    Reading,
    Strict,
    Unread,
    at_most,
    by_type,
    fault,
    if_read,
    ignore,
    lines_of,
    text_of,
)
from gateway.openai.images import ImagePart, images_of, joined
from gateway.openai.params import BOOKKEEPING, MESSAGES_LIMIT, AnyCompletionRequest, TokenBound
from gateway.openai.tools import FunctionCall, MessageCall, ToolsRequest
from wire.limits import TOP_LOGPROBS_LIMIT

_ROLES: Final[Mapping[str, MessageRole]] = {"developer": "system", "function": "tool"}

_ANSWERED: Final[Mapping[str, str]] = {"tool": "tool_call_id", "function": "name"}
"""For roles of results, the field that says of which call. In other messages it has no use."""

REASONED = frozenset({"reasoning_content", "reasoning"})
"""DeepSeek's and OpenRouter's name of what only an assistant's message has; one is enough."""
_OF_ANSWERS = REASONED | {"refusal"}
"""What has no use in other messages."""


class TextPart(Strict, place="messages.content"):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict, place="messages.content"):
    """A piece of an earlier answer that refused: text like any other."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ThinkingPart(Strict, place="messages.content"):
    """What a model thought before an earlier answer: for one whose chat template reads it, else ignored."""

    text: ClassVar[str] = ""
    type: Literal["thinking"]
    thinking: Annotated[Content[TextPart] | None, if_read("messages.content.thinking", *REASONED)]
    signature: Annotated[Unread, BOOKKEEPING] = None
    closed: Annotated[Unread, BOOKKEEPING] = None


Part = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[ImagePart, Tag("a image_url")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[ThinkingPart, Tag("a thinking")],
    by_type("only parts of the types text, image_url, refusal and thinking are supported"),
]


def _thoughts(content: str | Sequence[Part] | None) -> str:
    parts = () if content is None or isinstance(content, str) else content
    thoughts = [text_of(part.thinking) for part in parts if isinstance(part, ThinkingPart)]
    return "\n\n".join(filter(None, thoughts))


def _joined(content: str | list[Part], info: ValidationInfo) -> str | list[Part]:
    if info.data.get("role") in _ANSWERED and not images_of(content):
        return lines_of(content)
    return content if _thoughts(content) else joined(content)


Reasoned = Annotated[
    str | None,
    Field(description="of an earlier answer: for a model whose chat template reads it, else ignored"),
]
Effort = Annotated[str | None, Field(description="for a model whose chat template reads it, else ignored")]


def _read_switches(switches: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
    read = Reading.of(info).reads
    for name in islice((name for name, value in (switches or {}).items() if name not in read), 16):
        ignore(info, f"chat_template_kwargs.{name}")
    return {name: value for name, value in (switches or {}).items() if name in read} or None


Switches = Annotated[
    dict[str, Any] | None,
    Field(description="variables of the model's chat template; those that it does not read are ignored"),
    AfterValidator(_read_switches),
]


class ChatMessage(Strict, place="messages"):
    """One message; `developer` is another name for `system`, and `function` an older one for `tool`."""

    unsupported: ClassVar[Mapping[str, Any]] = {"audio": None, "partial": False, "prefix": False}
    refusals: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("partial", "prefix"), "is not supported: this server begins a new answer and continues none"
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | Items[Part], AfterValidator(_joined)] | None = None
    refusal: Annotated[
        str | None, Field(description="of an earlier answer: text that follows its content")
    ] = None
    name: Annotated[
        str | None, Field(description="of the function whose result it is; ignored in other messages")
    ] = None
    tool_call_id: str | None = None
    tool_calls: Items[MessageCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: Annotated[Reasoned, if_read("messages.reasoning_content", *REASONED)] = None
    reasoning: Annotated[Reasoned, if_read("messages.reasoning", *REASONED)] = None
    parsed: Annotated[
        Unread, Field(description="bookkeeping: the SDK sends along what it made of `content`")
    ] = None

    @classmethod
    def keys_in(cls, document: dict[str, Any]) -> frozenset[str]:
        """Return the keys that have a use in a message of its role."""
        keys = super().keys_in(document)
        if document.get("role") != "assistant" and not document.keys().isdisjoint(_OF_ANSWERS):
            keys -= _OF_ANSWERS
        if "name" not in document and "tool_call_id" not in document:
            return keys  # the common case
        return keys - {name for role, name in _ANSWERED.items() if role != document.get("role")}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Check that it has what its role needs and nothing else."""
        if self.content is None and self.role != "assistant":
            raise fault("content", "it is needed", "missing")
        needed = _ANSWERED.get(self.role)
        if needed is not None and getattr(self, needed) is None:
            raise fault(needed, "it is needed", "missing")
        if self.role != "user" and images_of(self.content):
            raise fault("content", "images belong only to a message of role user")
        for name in ("tool_calls", "function_call"):
            if getattr(self, name) and self.role != "assistant":
                raise fault(name, "this belongs only to a message of role assistant")
        if self.tool_calls and self.function_call:
            raise fault("function_call", "tool_calls say the same; give one")
        ids = [call.id for call in self.tool_calls or ()]
        if len(set(ids)) < len(ids):
            raise fault("tool_calls", "an id is there twice")
        return self

    def message(self, field: str) -> Message:
        """Return it as part of a conversation; `field` is its name in the request."""
        needed = _ANSWERED.get(self.role)
        return Message(
            role=cast("MessageRole", _ROLES.get(self.role, self.role)),
            content=text_of(self.content) + (self.refusal or ""),
            images=images_of(self.content, f"{field}.content"),
            calls=self._calls(),
            reasoning=self.reasoning_content or self.reasoning or _thoughts(self.content),
            answers=None if needed is None else getattr(self, needed),
            field=field,
        )

    def _calls(self) -> tuple[PastCall, ...]:
        if self.function_call is not None:
            # The older form has no ids: its results refer to the function's name.
            return (self.function_call.past(self.function_call.name),)
        return tuple(call.function.past(call.id) for call in self.tool_calls or ())


Messages = Annotated[
    Items[ChatMessage], Field(min_length=1, max_length=MESSAGES_LIMIT), at_most(MESSAGES_LIMIT)
]


def conversation(
    messages: Sequence[ChatMessage],
    offer: ToolOffer | None,
    effort: str | None = None,
    switches: Mapping[str, Any] | None = None,
) -> Conversation:
    """Return a request's `messages` as a conversation in which the tools of `offer` may be called.

    `effort` is one of the template's variables, too, and `switches` say more than it.
    """
    return Conversation(
        tuple(message.message(f"messages.{at}") for at, message in enumerate(messages)),
        offer,
        ({} if effort is None else {"reasoning_effort": effort}) | dict(switches or {}),
    )


class ChatRequest(ToolsRequest, AnyCompletionRequest):
    """A chat completion request. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "audio": None,
        "chat_template": None,
        "continue_final_message": False,
        "documents": None,
        "echo": False,
        "max_output_tokens": None,
        "modalities": ["text"],
        "web_search_options": None,
    }
    refusals: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "belongs to /v1/responses: give max_completion_tokens",
    }

    messages: Messages
    max_completion_tokens: Annotated[
        TokenBound | None, Field(description="counts before max_tokens, where both are given")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[Effort, if_read("reasoning_effort", "reasoning_effort")] = None
    chat_template_kwargs: Switches = None
    include_reasoning: Annotated[
        bool | None, Field(description="false: reasoning is left out of the answer")
    ] = None

    @property
    def token_bound(self) -> int | None:
        """The client's limit on new tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def bound_field(self) -> str:
        """The name of the field with that limit."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @cached_property
    def continued(self) -> Conversation:
        """The conversation and the tools."""
        offer = self.offer(single=self.parallel_tool_calls is False)
        return conversation(self.messages, offer, self.reasoning_effort, self.chat_template_kwargs)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given."""
        return super().sampling() | {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        super().check()
        offer = self.continued.offer
        if self.use_beam_search and offer is not None and call_rules(offer) is not None:
            raise InvalidRequestError(
                f"{offer.field} are not for use_beam_search=true where calls are held to their schemas.",
                param=offer.field,
            )
