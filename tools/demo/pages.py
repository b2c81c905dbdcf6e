"""Reads what the model learns by heart, the files of `pages/`, and determines which phrases are held back.

Held-back phrases are never trained on; the evaluation uses them.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.demo.values import LANGS, Lang, Text, fill

_FOLDER = Path(__file__).parent / "pages"


@dataclass(frozen=True, slots=True)
class Phrases:
    """Different ways to say the same thing."""

    trained: tuple[str, ...]
    held: tuple[str, ...]

    def get(self, *, held: bool) -> tuple[str, ...]:
        """Return the phrases for the evaluation if `held`, else those to train on."""
        return self.held if held else self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer in all the forms that a conversation may ask for."""

    say: Text
    short: Text
    why: Text | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Questions that have the same answer."""

    name: str
    questions: Mapping[Lang, Phrases]
    answer: Answer


@cache
def read(name: str) -> dict[str, Any]:
    """Return one file of `pages/`, with the values that it names."""
    found: dict[str, Any] = fill(raw(name))
    return found


def raw(name: str) -> dict[str, Any]:
    """Return one file of `pages/` as it is written."""
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def split(phrases: Sequence[str], held: int = 2) -> Phrases:
    """Split `phrases` so that the last `held` ones are held back."""
    return Phrases(tuple(phrases[:-held]), tuple(phrases[-held:]))


def answer(table: Mapping[str, Any]) -> Answer:
    """Return the answer in `table`: `say`, `short` and, if present, `why`."""
    return Answer(say=table["say"], short=table["short"], why=table.get("why"))


@cache
def facts() -> tuple[Page, ...]:
    """Return the pages about the project, its use, and concepts of the field."""
    return (*_pages("project"), *_pages("usage"), *_concepts())


@cache
def _held_back() -> frozenset[str]:
    pages = (
        question
        for page in (*facts(), *smalltalk())
        for lang in LANGS
        for question in page.questions[lang].held
    )
    lists = (
        phrase
        for table in read("phrases").values()
        for key, phrases in table.items()
        if key in (*LANGS, "say") and isinstance(phrases, list)
        for phrase in split(phrases).held
    )
    return frozenset(_bare(text) for text in (*pages, *lists))


def is_held_back(text: str) -> bool:
    """Return whether a question is held back for the evaluation, ignoring case and punctuation."""
    return _bare(text) in _held_back()


def _bare(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


@cache
def smalltalk() -> tuple[Page, ...]:
    """Return the pages of small talk: who the model is, greetings and thanks."""
    return _pages("smalltalk")


def _pages(file: str) -> tuple[Page, ...]:
    return tuple(
        Page(name, {lang: split(table[lang]) for lang in LANGS}, answer(table))
        for name, table in read(file).items()
    )


def _concepts() -> tuple[Page, ...]:
    tables = dict(read("concepts"))
    ask = tables.pop("ask")
    return tuple(
        Page(name, {lang: _about(split(ask[lang]), table["name"][lang]) for lang in LANGS}, answer(table))
        for name, table in tables.items()
    )


def _about(ask: Phrases, names: Sequence[str]) -> Phrases:
    trained, held = (tuple(form.format(name) for form in forms for name in names) for forms in _both(ask))
    return Phrases(trained, held)


def _both(phrases: Phrases) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return phrases.trained, phrases.held
