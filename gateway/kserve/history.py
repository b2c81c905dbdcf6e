"""The conversations of legacy clients: their `history`, and what they get of an answer.

A history is read in the form in which the client sends it, and returned in the same form. Clients send
nothing, a JSON list, or the `str` of such a list in Python; its items are role objects or [question, answer]
pairs. ChatGLM2's clients send a flat list of strings instead. What goes back is JSON whose values are all
strings, so that a client may read it as JSON or as a Python literal. How much of a history is used follows
the clients' own servers (divergence 11).

Nothing is evaluated. A literal is parsed only after its size, its nesting and every character outside strings
were checked, so that a hostile one costs milliseconds and cannot exhaust the stack. The original code
(`process_response` of the published `modeling_chatglm.py`) splits an answer into its segments, evaluates tool
calls, and answers with the last segment. Here a segment's first line names a tool only if such a tool was
offered; otherwise the answer is read as it is everywhere else (`gateway.chat.answers`).
"""

import ast
import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import msgspec

from gateway.chat.answers import AnswerText
from gateway.chat.conversation import ToolForm, known_form
from gateway.errors import InvalidRequestError
from wire.decoding import decode_bounded
from wire.history import Role, Turn
from wire.meta import Segment

MAX_BYTES: Final = 2**20
"""Limit of a whole history: far beyond any context."""

MAX_LITERAL_BYTES: Final = 2**17
"""Limit of a history in Python's notation, whose parser is about a hundred times slower than JSON's."""

MAX_DEPTH: Final = 16
"""Nesting of brackets: enough for a list of objects with tools and their JSON schemas."""


class Shape(enum.Enum):
    """The form in which a client writes a conversation."""

    OBJECTS = enum.auto()
    """[{"role", "metadata", "content"}, ...]"""
    PAIRS = enum.auto()
    """[[question, answer], ...]"""
    FLAT = enum.auto()
    """question, answer, question, answer, ..., one string each in the tensor itself."""


@dataclass(frozen=True, slots=True)
class ClientHistory:
    """A conversation. An item is the client's unit: a message, or a round of question and answer."""

    shape: Shape
    items: tuple[tuple[Turn, ...], ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation's turns, oldest first."""
        return tuple(turn for item in self.items for turn in item)

    def last_items(self, count: int) -> "ClientHistory":
        """Return the newest `count` items."""
        return replace(self, items=self.items[-count:] if count else ())

    def last_rounds(self, count: int) -> "ClientHistory":
        """Return the newest `count` rounds; two role objects count as one round."""
        return self.last_items(2 * count if self.shape is Shape.OBJECTS else count)

    def extended(self, question: Turn, answers: Sequence[Turn]) -> "ClientHistory":
        """Return the conversation with one more round; a pair has a single answer."""
        if self.shape is Shape.OBJECTS:
            return replace(self, items=(*self.items, (question,), *((answer,) for answer in answers)))
        return replace(self, items=(*self.items, (question, *answers)))


class _Object(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    content: str
    metadata: str | None = ""
    tools: list[dict[str, Any]] | str | None = None
    """Returned as a string of JSON, and also accepted as one."""


_Items = list[_Object | tuple[str, str]]

_decoder = msgspec.json.Decoder(_Items)
_tools_decoder = msgspec.json.Decoder(list[dict[str, Any]])

_LITERAL_TOKEN = re.compile(
    r"""(?P<string> "(?:[^"\\\0]|\\[^\0])*" | '(?:[^'\\\0]|\\[^\0])*' )
    | (?P<open> [\[({] )
    | (?P<close> [\])}] )
    | [\s,:]+ | (?:None|True|False)\b | -?[0-9]+(?:\.[0-9]+)?""",
    re.VERBOSE,
)
"""Everything in the `str` of lists, tuples and dicts of strings and plain values. Only brackets can nest, and
no two alternatives begin with the same character, so that matching takes linear time. No literal contains a
null character."""


def parse_history(document: bytes, empty: Shape) -> ClientHistory:
    """Read the contents of a `history` tensor; `empty` is the form of an empty one.

    Raises:
        InvalidRequestError: too large, neither JSON nor a literal, or not a list of role objects or of pairs.
    """
    if len(document) > MAX_BYTES:
        raise _unreadable(f"it has {len(document)} bytes, and may have {MAX_BYTES}")
    if not document.strip():
        return ClientHistory(empty)
    try:
        items = decode_bounded(_decoder, document)
    except msgspec.ValidationError as error:
        raise _unreadable(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        items = _parse_literal(document)
    if not items:
        return ClientHistory(empty)
    if any(isinstance(item, _Object) for item in items):
        return ClientHistory(Shape.OBJECTS, tuple((_turn(item),) for item in items))
    return ClientHistory(Shape.PAIRS, tuple(_round(*item) for item in items if not isinstance(item, _Object)))


def parse_flat(values: Sequence[bytes]) -> ClientHistory:
    """Read the flat form; both no string at all and one empty string mean an empty history.

    Raises:
        InvalidRequestError: too large, not UTF-8, or a question without its answer.
    """
    if (size := sum(map(len, values))) > MAX_BYTES:
        raise _unreadable(f"it has {size} bytes, and may have {MAX_BYTES}")
    if list(values) == [b""]:
        values = []
    if len(values) % 2:
        raise _unreadable(f"it is a flat list of questions and answers, and has {len(values)} strings")
    try:
        texts = [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise _unreadable(str(error)) from error
    return ClientHistory(Shape.FLAT, tuple(map(_round, texts[::2], texts[1::2])))


def encode_history(history: ClientHistory) -> list[bytes]:
    """Return the conversation as the elements of a `history` tensor in the client's own form."""
    if history.shape is Shape.FLAT:
        return [turn.content.encode() for turn in history.turns]
    if history.shape is Shape.PAIRS:
        document: list[Any] = [[turn.content for turn in item] for item in history.items]
    else:
        document = [_object(turn) for turn in history.turns]
    return [json.dumps(document, ensure_ascii=False).encode()]


def _parse_literal(document: bytes) -> _Items:
    neither = "it is neither JSON nor a Python literal"
    if len(document) > MAX_LITERAL_BYTES:
        raise _unreadable(
            f"{neither} of at most {MAX_LITERAL_BYTES} bytes; it has {len(document)}: write it as JSON"
        )
    try:
        text = document.decode().strip()
        _look_over(text, neither)
        return msgspec.convert(ast.literal_eval(text), _Items)
    except (SyntaxError, UnicodeDecodeError, MemoryError, RecursionError) as error:
        raise _unreadable(neither) from error
    except (ValueError, TypeError) as error:
        raise _unreadable(str(error) or neither) from error


def _look_over(text: str, neither: str) -> None:
    """Refuse a text with anything but strings, plain values and a few levels of brackets."""
    depth = position = 0
    while position < len(text):
        token = _LITERAL_TOKEN.match(text, position)
        if token is None:
            raise _unreadable(f"{neither} (at character {position})")
        position = token.end()
        if token["open"]:
            depth += 1
            if depth > MAX_DEPTH:
                raise _unreadable("it nests too deeply")
        elif token["close"]:
            depth -= 1


def _turn(item: _Object | tuple[str, str]) -> Turn:
    if not isinstance(item, _Object):
        raise _unreadable("role objects and pairs are mixed in it")
    tools = item.tools
    try:
        if tools is not None:  # a literal's may have what JSON has not, such as sets
            written = tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False)
            tools = decode_bounded(_tools_decoder, written.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise _unreadable(f"tools: {error}") from error
    if _depth_exceeds(tools, MAX_DEPTH):
        raise _unreadable("its tools nest too deeply")
    return Turn(item.role, _text(item.content), _text(item.metadata or ""), tools)


def _round(question: str, answer: str) -> tuple[Turn, Turn]:
    return Turn("user", _text(question)), Turn("assistant", _text(answer))


def _text(value: str) -> str:
    """Check that `value` can be encoded as UTF-8: an escape can produce half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _unreadable("a string in it is not Unicode text") from error
    return value


def _object(turn: Turn) -> dict[str, str]:
    document = {"role": turn.role, "metadata": turn.metadata, "content": turn.content}
    if turn.tools is not None:
        document["tools"] = json.dumps(turn.tools, ensure_ascii=False)
    return document


def _depth_exceeds(value: Any, limit: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return limit == 0 or any(_depth_exceeds(each, limit - 1) for each in value)


def _unreadable(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"history cannot be read: {why}")


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
    form = known_form(chat_format)
    tools = None if form is None else form.tools
    callable_names = _callable_names(conversation, tools)
    bounds = [0, *(segment.at for segment in segments), len(text)]
    parts = [_part(text[start:end], callable_names) for start, end in pairwise(bounds)]
    if not any(part.metadata for part in parts):
        answer = AnswerText()
        response = answer.push(text, segments) + answer.finish()
        return Reply(response, (Turn("assistant", response),))
    last = parts[-1]
    return Reply(_call(last, tools) if last.metadata else last.content, tuple(parts))


def _callable_names(conversation: Sequence[Turn], tools: ToolForm | None) -> set[str]:
    """Return the names that a segment's first line may hold; without a system turn, none."""
    system = [turn for turn in conversation if turn.role == "system"]
    if not system:
        return set()
    offered = {str(tool.get("name")) for turn in system for tool in turn.tools or ()}
    own_code = None if tools is None else tools.own_code
    return offered if own_code is None else offered | {own_code}


def _part(text: str, callable_names: set[str]) -> Turn:
    first, newline, rest = text.partition("\n")
    if newline and first.strip() in callable_names:
        return Turn("assistant", rest, metadata=first.strip())
    answer = AnswerText()
    return Turn("assistant", answer.push(text) + answer.finish())


def _call(turn: Turn, tools: ToolForm | None) -> str:
    said: dict[str, Any] = {"name": turn.metadata}
    parameters = None
    if tools is not None and turn.metadata != tools.own_code:
        parameters = tools.notation.read(turn.content)
    if parameters is None:
        said["content"] = turn.content
    else:
        said["parameters"] = parameters
    return json.dumps(said, ensure_ascii=False)
