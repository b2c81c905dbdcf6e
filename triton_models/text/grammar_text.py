"""Converts grammars from the wire's form to the form that llguidance reads.

Everything becomes Lark, with JSON schemas inline. Two options are set. No token is forced, since only the
model may choose how a text is split into tokens. White space within JSON is limited to a space, or a newline
and an indentation, so that a model cannot generate white space without end.

And converts llguidance's errors into messages for the client. Its errors about a grammar quote the document
that it was given, which we generated. Internal errors (panics, exceeded limits) are only logged.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import llguidance
import msgspec

from triton_models.errors import InvalidGrammarError
from triton_models.text.schemas import check_schema
from wire.grammar import TEXT_PART, Grammar, Part, decode_choices

log = logging.getLogger(__name__)

T = TypeVar("T")

OPTIONS: Final = '%llguidance {"no_forcing": true}\n'

_JSON_OPTIONS: Final = {"whitespace_pattern": r"( |\n {0,20})?"}

_NOT_NAMES = re.compile(
    r"""  "(?:\\.|[^"\\\n])*+"?  |  /(?:\\.|[^/\\\n])++/?  |  //[^\n]*  |  \#[^\n]*  """, re.VERBOSE
)
"""Strings, regular expressions and comments of a grammar. An unclosed one extends to the end of the line, so
that no search starts within it again, and every character is examined only once."""
_BLANKED = '""'
"""Replaces the matches of `_NOT_NAMES`; it is neither a name nor the beginning of a rule."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_UNREADABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
"""Characters that JSON does not escape within a string, and Lark does not accept there."""
_SPECIAL_TOKEN = re.compile(r"<[^<>\s][^<>\n]*>")
_USER_GRAMMAR = "answer"

ANSWER_RULE: Final = "ANSWER"
"""The name of the rule for a text whose grammar needs a separate rule."""

_LIMIT: Final = 300
_PANIC: Final = "panic:"
_BACKTRACE: Final = "<backtrace>"
"""What follows it, in the published library, is only addresses without names."""
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_QUOTED = re.compile(r"^ *(\d+) \| ([^\n]*)", re.MULTILINE)
_NOTHING_FOLLOWS: Final = "NoExtension"

FAILED: Final = "what compiles grammars failed on it, as it may where one is very large"
TOO_COMPLEX: Final = "it is too complex there"


@dataclass(frozen=True, slots=True)
class TextRule:
    """The grammar of a text, as part of a larger one."""

    body: str
    """The expression that matches the text, for use within a rule."""
    rules: str = ""
    """The rules that `body` refers to."""
    nested: str | None = None
    """The separate grammar that `body` refers to: the client's own, whose rules keep their names."""


@dataclass(frozen=True, slots=True)
class Document:
    """A grammar to compile.

    Args:
        start: the rules, the first of which is `start`.
        nested: see `TextRule`.
        openings: possible beginnings of answers, including hidden text, after which a client's grammar or
            schema begins; each with the part of a `tool_calls` grammar to blame if no answer can begin so, if
            there is one.
        parts: the parts of a `tool_calls` grammar, by what precedes the first `_` in the names of their
            rules.
    """

    start: str
    nested: str | None
    openings: Mapping[str, Part | None]
    parts: Mapping[str, Part] = field(default_factory=dict)

    def part_of(self, line: str) -> Part | None:
        """Return the part of a `tool_calls` grammar to which a line of the document belongs, if any."""
        return self.parts.get(line.partition(":")[0].partition("_")[0])

    def text(self) -> str:
        """Return the grammar in the form that llguidance reads."""
        if self.nested is None:
            return OPTIONS + self.start
        outer = {"lark_grammar": OPTIONS + self.start}
        return json.dumps(
            {"grammars": [outer, {"name": _USER_GRAMMAR, "lark_grammar": OPTIONS + self.nested}]}
        )


def text_document(grammar: Grammar, *, prefix: str) -> Document:
    """Return the document to compile for a grammar of any kind but `tool_calls`.

    Args:
        grammar: in the wire's form.
        prefix: hidden text before the answer.

    Raises:
        InvalidGrammarError: it is broken, or asks for what cannot be enforced.
    """
    text = text_rule(grammar)
    first = literal(prefix) + " " if prefix else ""
    return Document(f"start: {first}{text.body}\n{text.rules}", text.nested, {prefix: None})


def text_rule(grammar: Grammar) -> TextRule:
    """Return the rule for a text of a grammar of any kind but `tool_calls`.

    Raises:
        InvalidGrammarError: it is broken, or asks for what cannot be enforced.
    """
    match grammar.kind:
        case "json_object":
            return TextRule(json_rule({"type": "object"}))
        case "json_schema":
            schema = _read(msgspec.json.decode, grammar.text, "JSON schema")
            check_schema(schema, strict=True)
            return TextRule(json_rule(schema))
        case "regex":
            regex = llguidance.regex_to_lark(grammar.text, "")
            return TextRule(ANSWER_RULE, f"{ANSWER_RULE}: /{regex}/\n")
        case "choice":
            choices = _read(decode_choices, grammar.text, "list of choices")
            return TextRule(f"({' | '.join(map(literal, choices))})")
        case "lark":
            return TextRule(f"@{_USER_GRAMMAR}", nested=_checked(grammar.text))
        case "tool_calls":
            raise InvalidGrammarError("calls are no text")


def literal(text: str) -> str:
    """Return `text`, which must not be empty, as a string literal of Lark."""
    return _UNREADABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def json_rule(schema: Any, **options: Any) -> str:
    """Return the expression for JSON values that conform to `schema`; options in it are ignored."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS | options}, ensure_ascii=False)}"


def _checked(text: str) -> str:
    """Return a client's grammar in Lark's notation.

    Raises:
        InvalidGrammarError: the grammar cannot be read, or names a special token.
    """
    names = _NOT_NAMES.sub(_BLANKED, text)
    if _GBNF_RULE.search(names):
        try:
            text = llguidance.gbnf_to_lark.gbnf_to_lark(text)
        except Exception as error:  # noqa: BLE001 - any failure of a foreign parser is the text's fault
            raise InvalidGrammarError(f"not a grammar in GBNF: {error}") from None
        names = _NOT_NAMES.sub(_BLANKED, text)
    found = _SPECIAL_TOKEN.search(names)
    if found is not None:
        raise InvalidGrammarError(f"special tokens cannot be part of an answer: {found[0][:40]}")
    return text


def _read(decode: Callable[[str], T], text: str, what: str) -> T:
    try:
        return decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidGrammarError(f"not a {what}: {error}") from None


def about_grammar(error: str, document: Document) -> str:
    """Return the message about a document that failed to compile; it names the part at fault, if known."""
    if _panicked(error):
        return FAILED
    quoted = _QUOTED.search(error)
    words = _line(error[: quoted.start()] if quoted else error)
    place = _PLACE.match(words)
    if place is None:
        return words
    words = words[place.end() :]
    lines = {found[1]: found[2] for found in _QUOTED.finditer(error)}
    part = document.part_of(lines.get(place[1], ""))
    if part is not None:
        return part.blamed(words)
    if document.nested is None:
        return words
    # The error is in the client's own grammar, which begins after our line of options.
    words = f"line {int(place[1]) - 1}: {words}"
    return TEXT_PART.blamed(words) if document.parts else words


def about_schema(error: str) -> str:
    """Return the message about a schema that was checked on its own."""
    return FAILED if _panicked(error) else _line(error)


def about_mask(error: str) -> str:
    """Return the message about an answer that cannot continue."""
    if _panicked(error):
        return FAILED
    if not error or error.startswith(_NOTHING_FOLLOWS):
        return "nothing can follow"
    log.info("an answer cannot go on by its grammar: %s", error)
    return TOO_COMPLEX


def _panicked(error: str) -> bool:
    """Return whether an error comes from a panic; if so, log it."""
    said, traced, _ = error.partition(_BACKTRACE)
    panicked = bool(traced) or _PANIC in said
    if panicked:
        log.error("llguidance panicked: %s", said.strip())
    return panicked


def _line(words: str) -> str:
    return " ".join(words.split())[:_LIMIT]
