"""Varies questions in the ways in which people write the same question differently."""

import random

from tools.demo.pages import read
from tools.demo.values import Lang

_REFRAME = 0.35
_FILL = 0.25
_DISTURB = 0.12
"""Share of questions that lose a word, or get an unrelated word."""

_LONG_ENOUGH = {"en": 5, "zh": 7}
"""Only questions of at least this many words (characters in Chinese) are disturbed."""


def vary(rng: random.Random, question: str, lang: Lang, *, exact: bool = False) -> str:
    """Return `question` in other words, with words around it, and in other case and punctuation.

    `exact` keeps every character of it, for questions from which the answer copies something.
    """
    around = read("phrases")["around"]
    before, behind = rng.choice(around["before"][lang]), rng.choice(around["behind"][lang])
    if not exact:
        question = _rewrite(rng, question, lang)
        if before and lang == "en" and rng.random() < 0.7:
            question = question[:1].lower() + question[1:]
    return f"{before}{question}{behind}"


def random_words(rng: random.Random, lang: Lang, count: int) -> str:
    """Return everyday words that together make no sense."""
    words = read("words")[lang].split()
    return (" " if lang == "en" else "").join(rng.choice(words) for _ in range(count))


def _rewrite(rng: random.Random, question: str, lang: Lang) -> str:
    if rng.random() < _REFRAME:
        question = _reframe(rng, question, lang)
    if rng.random() < _FILL:
        question = _insert(rng, question, lang, rng.choice(read("words")["fillers"][lang]))
    if rng.random() < _DISTURB and len(_parts(question, lang)) >= _LONG_ENOUGH[lang]:
        question = (
            _drop(rng, question, lang)
            if rng.random() < 0.6
            else _insert(rng, question, lang, random_words(rng, lang, 1))
        )
    style = rng.random()
    if style < 0.15:
        question = question.rstrip("?.!。？！")
    elif style < 0.25:
        question = question.replace("？", "?").replace("。", ".")
    if lang == "en" and rng.random() < 0.2:
        question = question.lower()
    return question


def _reframe(rng: random.Random, question: str, lang: Lang) -> str:
    """Replace the question's opening words or pattern with another of the same meaning."""
    for frames in read("words")["frames"][lang]:
        for frame in frames:
            if question.startswith(frame) if lang == "en" else frame in question:
                return question.replace(frame, rng.choice(frames), 1)
    return question


def _parts(question: str, lang: Lang) -> list[str]:
    return question.split(" ") if lang == "en" else list(question)


def _join(parts: list[str], lang: Lang) -> str:
    return (" " if lang == "en" else "").join(parts)


def _insert(rng: random.Random, question: str, lang: Lang, word: str) -> str:
    parts = _parts(question, lang)
    # In a Chinese question, a word between two ASCII characters would tear a name apart.
    places = [
        at
        for at in range(len(parts) + 1)
        if lang == "en" or at in (0, len(parts)) or not (parts[at - 1].isascii() and parts[at].isascii())
    ]
    parts.insert(rng.choice(places), word)
    return _join(parts, lang)


def _drop(rng: random.Random, question: str, lang: Lang) -> str:
    parts = _parts(question, lang)
    del parts[rng.randrange(len(parts) - 1)]
    return _join(parts, lang)
