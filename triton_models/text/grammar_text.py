r"""Converts grammars from the wire's form to the form that llguidance reads.

Everything becomes Lark, with JSON schemas inline. Three options are set. No token is forced, since only the
model may choose how a text is split into tokens. White space within JSON is limited to a space, or a newline
and an indentation, so that a model cannot generate white space without end. JSON has no escapes with numbers:
llguidance takes `"\u0061"` for another name than `"a"`, so that a property would have the schema of others.

And converts llguidance's errors into messages for the client. Its errors about a grammar quote the document
that it was given, which we generated. Internal errors (panics, exceeded limits) are only logged.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import llguidance
import msgspec

from triton_models.errors import InvalidGrammarError
from triton_models.text.schemas import check_schema, check_size, keywords_alone, reachable, rewrite, simplify
from wire.grammar import Grammar, Reasoning, decode_choices

log = logging.getLogger(__name__)

T = TypeVar("T")

_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'

_JSON_OPTIONS: Final = {"whitespace_pattern": r"( |\n {0,20})?", "json_allowed_escapes": 'nrbtf\\"'}

ANYTHING: Final = "/(?s:.*)/"
"""The regular expression of any text."""
BLANKS: Final = r"/[ \t\r\n]{0,8}/"
"""That of white space around what a grammar is of: so little that a model cannot write it without end."""

_NOT_NAMES = re.compile(
    r"""  "(?:\\.|[^"\\\n])*+"?  |  /(?:\\.|[^/\\\n])++/?  |  //[^\n]*  |  \#[^\n]*  """, re.VERBOSE
)
"""Strings, regular expressions and comments of a grammar. An unclosed one extends to the end of the line, so
that no search starts within it again, and every character is examined only once."""
_BLANKED = '""'
"""Replaces the matches of `_NOT_NAMES`; it is neither a name nor the beginning of a rule."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_PART = re.compile(
    r"""  ("(?:\\.|[^"\\])*+"? | \[(?:\\.|[^\]\\])*+\]?)  |  ((?:\s|\#[^\n]*+)++) (\|?)  """,
    re.DOTALL | re.VERBOSE,
)
"""A string or a class of GBNF, or white space and comments and what may begin an alternative behind them."""
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|.)", re.DOTALL)
_TRANSLATED: Final = "%llguidance {}\n\n"
"""Begins what llguidance makes of GBNF."""
_UNREADABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]")
"""Characters that JSON does not escape within a string, and Lark does not accept there."""
_SPECIAL_TOKEN = re.compile(r"<[^<>\s][^<>\n]*>")
_USER_GRAMMAR = "answer"

_LIMIT: Final = 300
_PANIC: Final = "panic:"
_BACKTRACE: Final = "<backtrace>"
"""What follows it, in the published library, is only addresses without names."""
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_QUOTED = re.compile(r"^ *\d+ \| ", re.MULTILINE)
_OVERLAP: Final = "'coerce_one_of'"
"""An option, which llguidance advises where branches of a `oneOf` may overlap."""
_USE_ANY_OF: Final = "branches of oneOf may overlap; use anyOf"
_TRIED: Final = 32
"""How many `oneOf` of a schema are tried by themselves: this takes as long as the schema is large."""
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
    schema: Any = None
    """The JSON schema that `body` is made of, if it is."""


@dataclass(frozen=True, slots=True)
class Document:
    """A grammar to compile."""

    start: str
    """The rules, the first of which is `start`."""
    nested: str | None
    """See `TextRule`."""
    openings: list[str]
    """Beginnings of answers, including hidden text, after which a client's grammar or schema begins."""
    schemas: Sequence[tuple[str, Any]] = ()
    """The JSON schemas in it that are enforced in full, each after what its outermost place is called."""
    special_ids: tuple[int, ...] = ()
    """Special ids that an answer may hold, beside those that end it."""

    def text(self) -> str:
        """Return the grammar in the form that llguidance reads."""
        if self.nested is None:
            return _OPTIONS + self.start
        outer = {"lark_grammar": _OPTIONS + self.start}
        return json.dumps(
            {"grammars": [outer, {"name": _USER_GRAMMAR, "lark_grammar": _OPTIONS + self.nested}]}
        )


@dataclass(frozen=True, slots=True)
class Thought:
    """The rules for reasoning that may come first."""

    body: str = ""
    """The expression that matches it, or nothing where it need not come, to put before something."""
    rules: str = ""
    openings: tuple[str, ...] = ("",)
    """Beginnings of answers, up to what follows it."""

    @classmethod
    def of(cls, reasoning: Reasoning | None) -> "Thought":
        """Return those for `reasoning`; None: there is none."""
        if reasoning is None:
            return cls()
        end = f"thinking[suffix={literal(reasoning.end)}]: "
        thought = f"thought: thinking {BLANKS}\n"
        if reasoning.begun:
            return cls("thought ", f"{end}{ANYTHING}\n{thought}", (reasoning.end,))
        # With its mark in one expression: else a client's own, which may begin as the mark does, takes it.
        rules = f"{end}/\\s{{0,8}}{escaped(reasoning.begin)}(?s:.*)/\n{thought}"
        return cls("thought? ", rules, ("", reasoning.begin + reasoning.end))


def text_document(grammar: Grammar, *, prefix: str) -> Document:
    """Return the document to compile for a grammar of any kind but `tool_calls`.

    Args:
        grammar: in the wire's form.
        prefix: hidden text before the answer.

    Raises:
        InvalidGrammarError: it is broken, or asks for what cannot be enforced.
    """
    text, thought = text_rule(grammar), Thought.of(grammar.reasoning)
    start = f"start: {optional(prefix)}{thought.body}{text.body}\n{thought.rules}{text.rules}"
    openings = [prefix + opening for opening in thought.openings]
    return Document(start, text.nested, openings, [("$", text.schema)])


def text_rule(grammar: Grammar) -> TextRule:
    """Return the rule for a text of a grammar of any kind but `tool_calls`.

    Raises:
        InvalidGrammarError: it is broken, or asks for what cannot be enforced.
    """
    match grammar.kind:
        case "json_object":
            return TextRule(json_rule({"type": "object"}))
        case "json_schema":
            schema = read(msgspec.json.decode, grammar.text, "JSON schema")
            size = check_schema(schema, strict=True)
            check_size({"properties": size["properties"]})
            simplify(schema, size)
            rewrite(schema)
            return TextRule(json_rule(schema), schema=schema)
        case "regex":
            regex = llguidance.regex_to_lark(grammar.text, "")
            return TextRule("ANSWER", f"ANSWER: /{regex}/\n")
        case "choice":
            choices = read(decode_choices, grammar.text, "list of choices")
            return TextRule(f"({' | '.join(map(literal, choices))})")
        case "lark":
            return TextRule(f"@{_USER_GRAMMAR}", nested=_checked(grammar.text))
        case "tool_calls":
            raise InvalidGrammarError("calls are no text")


def literal(text: str) -> str:
    """Return `text`, which must not be empty, as a string literal of Lark."""
    return _UNREADABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def escaped(text: str) -> str:
    """Return the regular expression of `text`, for use within slashes, in Rust's syntax."""
    return re.escape(text).replace("\\ ", " ").replace("\\\n", "\\n").replace("/", "\\/")


def optional(text: str) -> str:
    """Return `text` as a literal to put before something; nothing if it is empty."""
    return f"{literal(text)} " if text else ""


def json_rule(schema: Any, **options: Any) -> str:
    """Return the expression for JSON values that conform to `schema`; options in it are ignored."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS | options}, ensure_ascii=False)}"


def read(decode: Callable[[str], T], text: str, what: str) -> T:
    """Return what `decode` makes of a grammar's text.

    Raises:
        InvalidGrammarError: the text is not a `what`.
    """
    try:
        return decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidGrammarError(f"not a {what}: {error}") from None


def _checked(text: str) -> str:
    """Return a client's grammar in Lark's notation.

    Raises:
        InvalidGrammarError: the grammar cannot be read, or names a special token.
    """
    names = _NOT_NAMES.sub(_BLANKED, text)
    if _GBNF_RULE.search(names):
        try:
            text = llguidance.gbnf_to_lark.gbnf_to_lark(_GBNF_PART.sub(_readable_part, text))
        except Exception as error:  # noqa: BLE001 - any failure of a foreign parser is the text's fault
            raise InvalidGrammarError(f"not a grammar in GBNF: {error}") from None
        names = _NOT_NAMES.sub(_BLANKED, text)
    found = _SPECIAL_TOKEN.search(names)
    if found is not None:
        raise InvalidGrammarError(f"special tokens cannot be part of an answer: {found[0][:40]}")
    return text


def _readable_part(found: re.Match[str]) -> str:
    """Return a part of a grammar in GBNF as llguidance reads it: with `|` on the line before."""
    return f"{found[3]}{found[2]}" if found[1] is None else _GBNF_ESCAPE.sub(_readable_escape, found[1])


def _readable_escape(found: re.Match[str]) -> str:
    """Return an escape such that llguidance's translation, which drops leading zeros, keeps its meaning."""
    if found.lastindex is None:
        return found[0]
    character = chr(int(found[found.lastindex], 16))
    if character.isascii():
        return f"\\x{ord(character):02x}"
    return f"\\u{ord(character):04x}" if _UNREADABLE.match(character) else character


def about_grammar(error: str, document: Document | None = None) -> str:
    """Return the message about a document, or a schema of its own, that failed to compile."""
    if _panicked(error):
        return FAILED
    for path, schema in document.schemas if document else ():
        if why := about_schema(schema, path):
            return why
    if _OVERLAP in error:
        return f"{_overlap(document.schemas if document else ())}{_USE_ANY_OF}"
    quoted = _QUOTED.search(error)
    words = " ".join(error[: quoted.start() if quoted else None].split())[:_LIMIT]
    place = _PLACE.match(words)
    if place is None:
        return words
    words = words[place.end() :]
    if document is None or document.nested is None or document.nested.startswith(_TRANSLATED):
        return words
    # The error is in the client's own grammar, which begins after our line of options.
    return f"line {int(place[1]) - 1}: {words}"


def fault(schema: dict[str, Any]) -> str:
    """Return why llguidance cannot express `schema`; empty if it can."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    broken, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return about_grammar(" ".join(messages)) if broken else ""


def _overlap(schemas: Sequence[tuple[str, Any]]) -> str:
    """Return where branches of a `oneOf` may overlap, and a colon; empty: it is not known where."""
    for path, schema in schemas:
        found = [(where, each) for where, each in reachable(schema, path) if "oneOf" in each]
        for where, each in found[: -_TRIED - 1 : -1]:  # the innermost first
            definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            if fault(definitions | each) == _USE_ANY_OF:
                return f"{where[:_LIMIT]}: "
    return ""


def about_schema(schema: Any, path: str) -> str | None:
    """Return the message about the first place in a schema, called `path`, that cannot be expressed alone."""
    for where, alone in keywords_alone(schema, path):
        if why := fault(alone):
            return f"{where[:_LIMIT]}: {why}"
    return None


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
