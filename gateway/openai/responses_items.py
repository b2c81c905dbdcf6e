"""The items of a Responses request's `input`: messages, function calls and their results.

Several adjacent items can form one message of the conversation: an assistant's text and its calls. Ids and
states of items are bookkeeping, since nothing is stored that they could refer to.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from gateway.errors import InvalidRequestError
from gateway.generation import Message, MessageRole, PastCall
from gateway.openai.content import Content, Unread, text_of
from gateway.openai.generation_request import NonEmpty, Strict
from gateway.openai.tools import FunctionCall

_ROLES: Mapping[str, MessageRole] = MappingProxyType(
    {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
)

_MESSAGE = "message"

ItemId = Annotated[str | None, Field(description="bookkeeping: accepted, not used")]
ItemStatus = Annotated[
    Literal["in_progress", "completed", "incomplete"] | None,
    Field(description="bookkeeping: accepted, not used"),
]


class InputTextPart(Strict):
    """A part of a message's content, or of a result."""

    place: ClassVar[str] = "input.content"

    type: Literal["input_text"]
    text: str


class OutputTextPart(Strict):
    """A part of an earlier answer."""

    place: ClassVar[str] = "input.content"

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Unread, Field(description="bookkeeping: of the answer that is sent back")] = None
    logprobs: Annotated[Unread, Field(description="bookkeeping: of the answer that is sent back")] = None


def _type_of(value: Any) -> str | None:
    tag = value.get("type") if isinstance(value, dict) else None
    return tag if isinstance(tag, str) else None


def _kind_of(value: Any) -> str | None:
    """Return the item's type, which messages may leave out."""
    return _type_of(value) or (_MESSAGE if isinstance(value, dict) and value.get("type") is None else None)


Part = Annotated[
    Annotated[InputTextPart, Tag("input_text")] | Annotated[OutputTextPart, Tag("output_text")],
    Discriminator(
        _type_of,
        custom_error_type="part_type",
        custom_error_message="only parts of the types input_text and output_text are supported",
    ),
]


class MessageItem(Strict):
    """One message; `developer` is another name for `system`."""

    place: ClassVar[str] = "input"

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content[Part]
    id: ItemId = None
    status: ItemStatus = None


class FunctionCallItem(FunctionCall):
    """A call that the model made. Its result refers to `call_id`."""

    place: ClassVar[str] = "input"

    type: Literal["function_call"]
    call_id: NonEmpty
    id: ItemId = None
    status: ItemStatus = None


class FunctionResultItem(Strict):
    """The result of a call."""

    place: ClassVar[str] = "input"

    type: Literal["function_call_output"]
    call_id: NonEmpty
    output: Content[InputTextPart]
    id: ItemId = None
    status: ItemStatus = None


class ReasoningItem(Strict):
    """What a model thought before an earlier answer: no model here takes it."""

    type: Literal["reasoning"]
    id: ItemId = None
    status: ItemStatus = None
    summary: Unread = None
    content: Unread = None
    encrypted_content: Unread = None


Item = Annotated[
    Annotated[MessageItem, Tag(_MESSAGE)]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="item_type",
        custom_error_message="only items of the types message, function_call, function_call_output and "
        "reasoning are supported",
    ),
]


@dataclass(slots=True)
class _Turn:
    """A message of the conversation, while its items are collected."""

    role: MessageRole
    path: str
    texts: list[list[str]] = field(default_factory=list)
    """Parts of text; a call starts a new list."""
    calls: dict[str, PastCall] = field(default_factory=dict)
    """By id."""
    answers: str | None = None

    def message(self) -> Message:
        return Message(
            role=self.role,
            content="\n\n".join(text for pieces in self.texts if (text := "".join(pieces))),
            calls=tuple(self.calls.values()),
            answers=self.answers,
            field=self.path,
        )


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Return `items` as a conversation.

    Calls belong to the assistant message that they follow, or to one without text. So does text that follows
    a call without a result in between, as in an earlier answer of several parts; a blank line separates the
    text before a call from that after it.

    Raises:
        InvalidRequestError: a call's arguments are not a JSON object, or its id is used twice.
    """
    turns: list[_Turn] = []
    for at, item in enumerate(items):
        path = f"input.{at}"
        last = turns[-1] if turns and turns[-1].role == "assistant" else None
        if isinstance(item, ReasoningItem):
            continue
        if isinstance(item, FunctionResultItem):
            turns.append(_Turn("tool", path, [[text_of(item.output)]], answers=item.call_id))
        elif isinstance(item, FunctionCallItem):
            if last is None:
                last = _Turn("assistant", path)
                turns.append(last)
            if item.call_id in last.calls:
                raise InvalidRequestError(
                    f"{path}.call_id is that of a call before it.", param=f"{path}.call_id"
                )
            last.texts.append([])
            last.calls[item.call_id] = item.past(item.call_id, path)
        elif last is not None and last.calls and item.role == "assistant":
            last.texts[-1].append(text_of(item.content))
        else:
            turns.append(_Turn(_ROLES[item.role], path, [[text_of(item.content)]]))
    return [turn.message() for turn in turns]
