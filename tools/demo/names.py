"""Names of cities and people, mostly invented, so that the model learns to copy and not to remember them."""

import random

from tools.demo.pages import read
from tools.demo.values import Lang

_SUFFIXES = ["市", "县", "镇", "州"]

COMMON_HAN = "".join(
    bytes([row, cell]).decode("gb2312", "ignore") for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF)
)
"""The 3,755 most common characters, which GB 2312 lists first."""


def city(rng: random.Random, lang: Lang, *, held: bool) -> str:
    """Return a city's name. `held`: that of a real city that no training dialogue mentions."""
    cities = read("tools")["cities"]
    kept_back = cities[f"held_{lang}"]
    if held:
        return str(rng.choice(kept_back))
    if rng.random() < 0.3:
        return str(rng.choice(cities[lang]))
    while True:
        name = invented(rng, lang)
        if lang == "zh" and rng.random() < 0.15:
            name += rng.choice(_SUFFIXES)
        if not any(each in name or name in each for each in kept_back):
            return name


def person(rng: random.Random, lang: Lang) -> str:
    """Return an invented person's name."""
    return _han(rng, rng.randint(2, 3)) if lang == "zh" else _word(rng)


def invented(rng: random.Random, lang: Lang) -> str:
    """Return an invented name of one or more words or characters."""
    if lang == "zh":
        return _han(rng, rng.choices((2, 3, 4, 5), (5, 4, 2, 1))[0])
    words = [_word(rng) for _ in range(rng.choices((1, 2, 3), (7, 3, 1))[0])]
    name = ("-" if rng.random() < 0.08 else " ").join(words)
    style = rng.random()
    if style < 0.12:
        return name.lower()
    if style < 0.16:
        return name.upper()
    return name


def _word(rng: random.Random) -> str:
    syllables = rng.choices((1, 2, 3, 4), (1, 4, 3, 1))[0]
    parts = read("words")["syllables"]
    word = "".join(rng.choice(parts[part]) for _ in range(syllables) for part in ("first", "vowel", "last"))
    return word.capitalize()


def _han(rng: random.Random, length: int) -> str:
    known = "".join(read("tools")["cities"]["zh"])
    return "".join(rng.choice(known if rng.random() < 0.4 else COMMON_HAN) for _ in range(length))
