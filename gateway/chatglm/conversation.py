"""OpenAI messages -> what a ChatGLM model is asked: the newest message and the history before it.

What the formats cannot hold as it stands is joined or refused, never dropped:

* all system messages join into one, the first turn, in their order and a blank line apart;
* ChatGLM2 knows only rounds of question and answer: consecutive user (or assistant) messages join the same
  way. A conversation that begins with an assistant message stays: its round has an empty question, which is
  what the model's own history of (question, answer) pairs makes of a greeting;
* ChatGLM3 keeps every message as its own turn, and a conversation that ends with an assistant message is
  rendered as it stands: another answer follows that one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal

from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.generation import Message
from wire.history import Role, Turn

Speaker = Literal["user", "assistant"]

_BLANK_LINE = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation as the wire has it: `role` says who speaks in `prompt`, the newest turn."""

    prompt: str
    role: Role
    history: list[Turn]


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A user or assistant message and its place in the request."""

    at: int
    role: Speaker
    content: str


def to_history(messages: Sequence[Message], chat_format: str) -> ChatInput:
    """Turn `messages` into what a model of `chat_format` ("chatglm2" or "chatglm3") is asked.

    Raises:
        InvalidRequestError: the format cannot express the conversation; `param` names the message.
        UpstreamProtocolError: the model speaks neither format.
    """
    if chat_format not in ("chatglm2", "chatglm3"):
        raise UpstreamProtocolError(f"the model's chat format {chat_format!r} is not known to this gateway")
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message", param="messages")
    only_rounds = chat_format == "chatglm2"
    system, spoken = _split(messages, only_rounds=only_rounds)
    if only_rounds:
        if spoken and spoken[-1].role == "assistant":
            raise InvalidRequestError(
                "a ChatGLM2 conversation ends with a question, not with an assistant message",
                param=f"messages.{spoken[-1].at}",
            )
        spoken = _join_neighbours(spoken)
    turns = [Turn("system", _join(system))] if system else []
    turns += [Turn(message.role, message.content) for message in spoken]
    *history, newest = turns
    return ChatInput(prompt=newest.content, role=newest.role, history=history)


def _split(messages: Sequence[Message], *, only_rounds: bool) -> tuple[list[str], list[_Spoken]]:
    """Part the system texts from what user and assistant said."""
    system: list[str] = []
    spoken: list[_Spoken] = []
    for at, message in enumerate(messages):
        if message.role == "system":
            system.append(message.content)
        elif message.role == "tool":
            raise InvalidRequestError(
                "ChatGLM2 has no tools"
                if only_rounds
                else "a tool message must answer an assistant's tool call",
                param=f"messages.{at}",
            )
        else:
            spoken.append(_Spoken(at, message.role, message.content))
    return system, spoken


def _join_neighbours(spoken: Iterable[_Spoken]) -> list[_Spoken]:
    joined = []
    for role, group in groupby(spoken, key=attrgetter("role")):
        run = list(group)
        joined.append(_Spoken(run[0].at, role, _join(message.content for message in run)))
    return joined


def _join(texts: Iterable[str]) -> str:
    """Join with blank lines; an empty text adds none."""
    return _BLANK_LINE.join(text for text in texts if text)
