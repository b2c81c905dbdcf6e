"""Turns llguidance's errors about a grammar into messages for the client that sent it.

Its errors about a grammar quote the document that it was given, which we generated. Internal errors (panics,
exceeded limits) are only logged.
"""

import logging
import re
from typing import Final

from triton_models.text.grammar_text import Document
from wire.grammar import TEXT_PART

log = logging.getLogger(__name__)

_LIMIT: Final = 300
_PANIC: Final = "panic:"
_BACKTRACE: Final = "<backtrace>"
"""What follows it, in the published library, is only addresses without names."""
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_QUOTED = re.compile(r"^ *(\d+) \| ([^\n]*)", re.MULTILINE)
_NOTHING_FOLLOWS: Final = "NoExtension"

FAILED: Final = "what compiles grammars failed on it, as it may where one is very large"
TOO_COMPLEX: Final = "it is too complex there"


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
