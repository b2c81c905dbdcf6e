"""What the text of an answer is held to while it is sampled: a grammar, by its kind and its text.

A grammar is about what an answer says, not about how a model's format writes it: the models' side brings the
two together, and neither side of the wire names a token.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from wire.decoding import decode_bounded
from wire.limits import ALTERNATIVES_LIMIT, GRAMMAR_LIMIT, TOOLS_LIMIT

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool_calls"]
"""What `text` holds: nothing (any JSON object will do), a JSON schema, a regular expression (of the whole
answer, in Rust's syntax), a JSON list of strings (`Choices`), a grammar in llguidance's dialect of Lark or in
GBNF, or a JSON document about calls (`ToolCalls`)."""

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
    """Refuse a schema that cannot be expressed in full. Otherwise such parts of it are left out, and
    arguments follow the rest."""


class ToolCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An answer of text and calls, each call's arguments held to its tool's schema."""

    tools: Annotated[list[CallableTool], msgspec.Meta(min_length=1, max_length=TOOLS_LIMIT)]
    required: bool = False
    """The answer is calls alone, at least one; else it may be text, and text before calls."""
    single: bool = False
    """At most one call."""
    text: Grammar | None = None
    """What an answer that calls no tool is held to, of any kind but `tool_calls`; calls have no text before
    them then. None: any text."""


Choices = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]],
    msgspec.Meta(min_length=1, max_length=ALTERNATIVES_LIMIT),
]
"""The strings of which an answer is one."""


@dataclass(frozen=True, slots=True)
class Part:
    """What of a rule of calls a refusal is about: a tool's schema, or the grammar of text beside calls."""

    tool: str | None
    """The tool's name; None: it is the text's grammar."""

    def blamed(self, what: str) -> str:
        """Return the words of a refusal of `what` is wrong with it."""
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
    """Return what the words of a refusal are about; None: no part of its own, or a grammar that has none."""
    found = _BLAMED.match(words)
    return None if found is None else Part(found[1])


def decode_choices(text: str) -> list[str]:
    """Read the text of a grammar of kind `choice`.

    Raises:
        msgspec.MsgspecError: it is not that.
    """
    return decode_bounded(_choices, text.encode())
