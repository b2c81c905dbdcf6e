"""Grammars: constraints on the text of an answer, enforced while it is sampled.

A grammar describes what an answer says, not how a chat format writes it. The model side combines the two, so
no grammar on the wire names a token.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from wire.decoding import decode_bounded
from wire.limits import ALTERNATIVES_LIMIT, GRAMMAR_LIMIT, TOOLS_LIMIT

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool_calls"]
"""What `text` contains, in this order: nothing (any JSON object), a JSON schema, a regular expression (in
Rust's syntax, matching the whole answer), a JSON list of strings (`Choices`), a grammar in llguidance's
dialect of Lark or in GBNF, a JSON document about calls (`ToolCalls`)."""

ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


Mark = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What may be said before that which a grammar is of, within marks that are text to the tokenizer."""

    begin: Mark
    end: Mark
    begun: bool = False
    """The prompt ends within it, so that it must end first; otherwise the answer may begin with it."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A grammar in the form in which a generation carries it."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=GRAMMAR_LIMIT)] = ""
    reasoning: Reasoning | None = None
    """Only of an answer to a raw prompt; None: the grammar is of all of it."""


RESTRICTIONS: Final = frozenset(
    {
        *("type", "enum", "const", "$ref", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
        *("$recursiveAnchor", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "extends", "disallow"),
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "required", "minProperties", "maxProperties", "dependencies", "requires"),
        *("dependentRequired", "dependentSchemas", "items", "prefixItems", "additionalItems"),
        *("unevaluatedItems", "contains", "minContains", "maxContains", "minItems", "maxItems"),
        *("uniqueItems", "pattern", "format", "minLength", "maxLength", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "minimumCanEqual", "maximumCanEqual", "multipleOf"),
        *("divisibleBy", "maxDecimal"),
    }
)
"""The keywords of JSON schemas, of any draft, that restrict something. Others are annotations, whoever made
them up, as in llguidance."""


class CallableTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that an answer may call."""

    name: ToolName
    parameters: dict[str, Any] = {}
    """The JSON schema of its arguments, which are an object."""
    strict: bool = False
    """Refuse a schema that cannot be enforced in full. Otherwise the parts that cannot be enforced are
    skipped, and the arguments conform to the rest."""


class ToolCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An answer of text and calls, where each call's arguments conform to its tool's schema."""

    tools: Annotated[list[CallableTool], msgspec.Meta(min_length=1, max_length=TOOLS_LIMIT)]
    required: bool = False
    """The answer consists of calls only, at least one; otherwise it may also be text, or text followed by
    calls."""
    single: bool = False
    """At most one call, which nothing follows."""
    marks: tuple[Mark, Mark] | None = None
    """Of an answer to a raw prompt: what stands before and behind a call, which is
    `{"name": N, "arguments": {...}}`. None: all of the answer is a JSON list of such calls, which must be
    required, or one of these:"""
    opening: Mark | None = None
    """Of an answer to a raw prompt: the special token before calls, which end the answer: a JSON list of such
    calls or, given `between`, calls that each stand behind one. As Mistral writes them."""
    between: Mark | None = None
    """The special token between a call's name and its arguments, where no list is written."""
    bare: Literal["object", "line"] | None = None
    """Of an answer to a raw prompt: what begins as a call is calls, and text begins otherwise. An object is
    `{"name": N, "parameters": {...}}`, with semicolons between several, as Llama 3 writes them; a line is a
    name, behind which the arguments are all of the answer, as GLM-4-0414 writes a call."""
    text: Grammar | None = None
    """The grammar of an answer that calls no tool, of any kind but `tool_calls`; there can then be no text
    before calls. None: any text."""


Choices = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]],
    msgspec.Meta(min_length=1, max_length=ALTERNATIVES_LIMIT),
]
"""The strings of which the answer is exactly one."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a `ToolCalls` at fault in a refusal: a tool's schema, or the grammar of the text."""

    tool: str | None
    """The tool's name; None: the text's grammar."""

    def blamed(self, what: str) -> str:
        """Return a refusal's message: `what`, preceded by the name of this part."""
        return f"text: {what}" if self.tool is None else f"tool {self.tool}: {what}"


TEXT_PART = Part(None)

_BLAMED = re.compile(r"(?:tool ([^\s:]+)|text): ")

_tool_calls = msgspec.json.Decoder(ToolCalls)
_choices = msgspec.json.Decoder(Choices)


def decode_tool_calls(text: str) -> ToolCalls:
    """Read the text of a grammar of kind `tool_calls`.

    Raises:
        msgspec.MsgspecError: `text` is not such a document.
    """
    return decode_bounded(_tool_calls, text.encode())


def part_at_fault(words: str) -> Part | None:
    """Return the part that a refusal's message names; None if it names none."""
    found = _BLAMED.match(words)
    return None if found is None else Part(found[1])


def decode_choices(text: str) -> list[str]:
    """Read the text of a grammar of kind `choice`.

    Raises:
        msgspec.MsgspecError: `text` is not such a list.
    """
    return decode_bounded(_choices, text.encode())
