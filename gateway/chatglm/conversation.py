"""Turns messages into ChatGLM's form of a prompt: the newest message, and the history before it.

What a format cannot express directly is joined or refused, never dropped:

* all system messages join into one, the first turn, in their order and a blank line apart;
* ChatGLM2 knows only rounds of question and answer: consecutive user (or assistant) messages join the same
  way. If a conversation begins with an assistant message, that round has an empty question, as a greeting has
  in the model's own history of (question, answer) pairs;
* ChatGLM3 and GLM-4 keep every message as its own turn, and a conversation that ends with an assistant
  message is rendered as it stands: another answer follows that one;
* tools are in the system turn, for ChatGLM3 after the sentence that the model was trained with. A call is an
  assistant turn of its own, after its message's text, and its result an observation. The results of one
  message's calls come in the order of the calls: only this order tells the model which is which.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal

import msgspec

from gateway.chatglm.formats import ChatForm, ToolForm
from gateway.chatglm.tool_offer import documents
from gateway.chatglm.tool_results import ToolResults
from gateway.errors import InvalidRequestError
from gateway.generation import Message, ToolOffer
from wire.history import Role, Turn

Speaker = Literal["user", "assistant"]

_BLANK_LINE = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation in the wire's form: `role` is the speaker of `prompt`, the newest turn."""

    prompt: str
    role: Role
    history: list[Turn]


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A user or assistant message, and its name in the request."""

    field: str
    role: Speaker
    content: str


def to_history(messages: Sequence[Message], form: ChatForm, offer: ToolOffer | None = None) -> ChatInput:
    """Turn `messages` into the input of a model with the chat format `form`.

    Args:
        messages: the conversation.
        form: the model's chat format.
        offer: the tools that it may call.

    Raises:
        InvalidRequestError: the format cannot express the conversation; `param` names the message.
    """
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message", param="messages")
    turns = _rounds(messages, form, offer) if form.tools is None else _turns(messages, form.tools, offer)
    *history, newest = turns
    if newest.tools is not None:
        raise InvalidRequestError(
            "a conversation with tools needs a message beside the system's", param=messages[-1].field
        )
    return ChatInput(prompt=newest.content, role=newest.role, history=history)


def _rounds(messages: Sequence[Message], form: ChatForm, offer: ToolOffer | None) -> list[Turn]:
    """Return the turns of a conversation without tools: text, one speaker after the other."""
    if offer is not None:
        raise InvalidRequestError(
            f"{form.title} was trained without tools, and cannot use any", param=offer.field
        )
    spoken: list[_Spoken] = []
    for message in messages:
        if message.role == "tool" or message.calls:
            raise InvalidRequestError(f"{form.title} has no tools", param=message.field)
        if message.role != "system":
            spoken.append(_Spoken(message.field, message.role, message.content))
    if spoken and spoken[-1].role == "assistant":
        raise InvalidRequestError(
            f"a {form.title} conversation ends with a question, not with an assistant message",
            param=spoken[-1].field,
        )
    return [
        *_system(messages),
        *(Turn(message.role, message.content) for message in _join_neighbours(spoken)),
    ]


def _turns(messages: Sequence[Message], tools: ToolForm, offer: ToolOffer | None) -> list[Turn]:
    """Return the turns of a conversation with tools: one per message, call and result."""
    turns = _system(messages) if offer is None else [_system_with_tools(messages, tools, offer)]
    write = tools.notation.write
    results = ToolResults()
    for message in messages:
        if message.role == "system":
            continue
        if message.role == "tool":
            results.add(message)
            continue
        turns += results.turns()
        if message.content or not message.calls:
            turns.append(Turn(message.role, message.content))
        for call in message.calls:
            turns.append(Turn("assistant", write(msgspec.json.decode(call.arguments)), metadata=call.name))
        results = ToolResults(message)
    return turns + results.turns()


def _system(messages: Sequence[Message]) -> list[Turn]:
    """Return the system's turn, if there is one."""
    texts = _system_texts(messages)
    return [Turn("system", _join(texts))] if texts else []


def _system_with_tools(messages: Sequence[Message], tools: ToolForm, offer: ToolOffer) -> Turn:
    texts = _system_texts(messages)
    if tools.instruction and not (texts and texts[-1].rstrip().endswith(tools.instruction)):
        texts.append(tools.instruction)
    return Turn("system", _join(texts), tools=documents(offer))


def _system_texts(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role == "system"]


def _join_neighbours(spoken: Iterable[_Spoken]) -> list[_Spoken]:
    joined = []
    for role, group in groupby(spoken, key=attrgetter("role")):
        run = list(group)
        joined.append(_Spoken(run[0].field, role, _join(message.content for message in run)))
    return joined


def _join(texts: Iterable[str]) -> str:
    """Join with blank lines; an empty text adds none."""
    return _BLANK_LINE.join(text for text in texts if text)
