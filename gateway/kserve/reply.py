"""What legacy clients get of an answer: the text, and the new turns of their history.

The original code (`process_response` of the published `modeling_chatglm.py`) splits the answer into its
segments, evaluates tool calls, and answers with the last segment. Here nothing is evaluated, and the first
line of a segment names a tool only if such a tool was offered; otherwise the answer is read as it is
everywhere else (`gateway.chatglm.answer_text`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from gateway.chatglm.answer_text import AnswerText
from wire.calls import NOTATIONS
from wire.history import Turn
from wire.meta import Segment

INTERPRETER: Final = "interpreter"
"""What ChatGLM3 writes in place of a tool's name before its own code."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one question."""

    response: str
    turns: tuple[Turn, ...]
    """The assistant's turns; one per segment if a tool is called."""


def read_reply(
    text: str, segments: Sequence[Segment], conversation: Sequence[Turn], chat_format: str
) -> Reply:
    """Read the raw answer `text` of a model of `chat_format` to `conversation`.

    If the last segment is a tool call, the response is JSON: `{"name", "parameters"}`, or
    `{"name", "content"}` if the call cannot be parsed or is code.

    Raises:
        ValueError: a segment begins outside the text.
    """
    callable_names = _callable_names(conversation)
    bounds = [0, *(segment.at for segment in segments), len(text)]
    parts = [_part(text[start:end], callable_names) for start, end in pairwise(bounds)]
    if not any(part.metadata for part in parts):
        answer = AnswerText()
        response = answer.push(text, segments) + answer.finish()
        return Reply(response, (Turn("assistant", response),))
    last = parts[-1]
    return Reply(_call(last, chat_format) if last.metadata else last.content, tuple(parts))


def _callable_names(conversation: Sequence[Turn]) -> set[str]:
    """Return the names that a segment's first line may hold; without a system turn, none."""
    system = [turn for turn in conversation if turn.role == "system"]
    if not system:
        return set()
    offered = {str(tool.get("name")) for turn in system for tool in turn.tools or ()}
    return offered | {INTERPRETER}


def _part(text: str, callable_names: set[str]) -> Turn:
    first, newline, rest = text.partition("\n")
    if newline and first.strip() in callable_names:
        return Turn("assistant", rest, metadata=first.strip())
    answer = AnswerText()
    return Turn("assistant", answer.push(text) + answer.finish())


def _call(turn: Turn, chat_format: str) -> str:
    said: dict[str, Any] = {"name": turn.metadata}
    notation = None if turn.metadata == INTERPRETER else NOTATIONS.get(chat_format)
    parameters = None if notation is None else notation.read(turn.content)
    if parameters is None:
        said["content"] = turn.content
    else:
        said["parameters"] = parameters
    return json.dumps(said, ensure_ascii=False)
