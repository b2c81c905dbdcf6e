"""Grammars: constraints on the text of an answer, enforced while it is sampled.

A grammar describes what an answer says, not how a chat format writes it: the model side combines the two, and
no token is named on the wire.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from wire.decoding import decode_bounded
from wire.limits import ALTERNATIVES_LIMIT, GRAMMAR_LIMIT, TOOLS_LIMIT

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool_calls"]
"""What `text` is: empty (any JSON object), a JSON schema, a regular expression (matching the whole answer, in
Rust's syntax), a JSON list of strings (`Choices`), a grammar in llguidance's dialect of Lark or in GBNF, or a
JSON document about calls (`ToolCalls`)."""

ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A grammar, as a generation carries it."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=GRAMMAR_LIMIT)] = ""


class CallableTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that an answer may call."""

    name: ToolName
    parameters: dict[str, Any] = {}
    """The JSON schema of its arguments, an object."""
    strict: bool = False
    """Refuse a schema that cannot be enforced in full. Otherwise such parts are skipped, and the arguments
    follow the rest."""


class ToolCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An answer of text and calls, where each call's arguments follow its tool's schema."""

    tools: Annotated[list[CallableTool], msgspec.Meta(min_length=1, max_length=TOOLS_LIMIT)]
    required: bool = False
    """The answer is calls only, at least one; otherwise it may be text, or text followed by calls."""
    single: bool = False
    """At most one call."""
    text: Grammar | None = None
    """The grammar of an answer that calls no tool, of any kind but `tool_calls`; calls then have no text
    before them. None: any text."""


Choices = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]],
    msgspec.Meta(min_length=1, max_length=ALTERNATIVES_LIMIT),
]
"""The strings, one of which is the answer."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a `ToolCalls` that a refusal is about: a tool's schema, or the grammar of the text."""

    tool: str | None
    """The tool's name; None: it is the text's grammar."""

    def blamed(self, what: str) -> str:
        """Return a refusal's message that `what` is wrong with this part."""
        return f"text: {what}" if self.tool is None else f"tool {self.tool}: {what}"


TEXT_PART = Part(None)

_BLAMED = re.compile(r"(?:tool ([^\s:]+)|text): ")

_tool_calls = msgspec.json.Decoder(ToolCalls)
_choices = msgspec.json.Decoder(Choices)


def decode_tool_calls(text: str) -> ToolCalls:
    """Read the text of a grammar of kind `tool_calls`.

    Raises:
        msgspec.MsgspecError: it is not that.
    """
    return decode_bounded(_tool_calls, text.encode())


def part_at_fault(words: str) -> Part | None:
    """Return the part that a refusal's message is about; None: it names none."""
    found = _BLAMED.match(words)
    return None if found is None else Part(found[1])


def decode_choices(text: str) -> list[str]:
    """Read the text of a grammar of kind `choice`.

    Raises:
        msgspec.MsgspecError: it is not that.
    """
    return decode_bounded(_choices, text.encode())
