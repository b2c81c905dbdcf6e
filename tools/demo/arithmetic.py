"""Generates questions about small sums, differences and products, which the model learns by heart."""

import random
import zlib
from dataclasses import dataclass

from tools.demo.pages import Answer, read, split
from tools.demo.values import LARGEST_FACTOR, LARGEST_TERM, Lang

_TABLE = 10
"""Products of factors up to this are answered directly; larger ones are built from these and from tens."""

_HELD_SHARE = 10
"""One in this many pairs of numbers and expressions is held back."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A question about two small numbers."""

    question: str
    answer: Answer
    result: int


def is_held(text: str) -> bool:
    """Return whether a sum or expression is held back; the result is the same on every machine."""
    return zlib.crc32(text.encode()) % _HELD_SHARE == 0


def operands(rng: random.Random, operator: str) -> tuple[int, int]:
    """Return two numbers in the range that the model learns for `operator` (+, - or *)."""
    largest = LARGEST_FACTOR if operator == "*" else LARGEST_TERM
    a, b = rng.randint(0, largest), rng.randint(0, largest)
    if operator == "-" and a < b and rng.random() < 0.7:
        a, b = b, a
    return a, b


def small_sum(rng: random.Random, lang: Lang, *, held: bool, known_words: bool = False) -> Sum:
    """Return a sum, difference or product.

    `held`: use a pair of numbers that is never trained on, and held-back words unless `known_words`.
    """
    while True:
        operator = rng.choices("+-*", (4, 4, 3))[0]
        a, b = operands(rng, operator)
        if _pair_is_held(operator, a, b) == held:
            return _sum(_question(rng, lang, operator, a, b, held=held and not known_words), operator, a, b)


def next_sum(rng: random.Random, before: int, lang: Lang, *, held: bool) -> Sum | None:
    """Return a question that continues from the last result, or None if it does not fit.

    It does not fit if the last result is out of the learned range, or the pair of numbers is held back and
    `held` is false, or the reverse.
    """
    operator = rng.choice("+-")
    b = rng.randint(1, LARGEST_FACTOR)
    if not 0 <= before <= LARGEST_TERM or _pair_is_held(operator, before, b) != held:
        return None
    forms = split(read("arithmetic")[operator][f"next_{lang}"]).get(held=held)
    return _sum(rng.choice(forms).format(b=b), operator, before, b)


def _question(rng: random.Random, lang: Lang, operator: str, a: int, b: int, *, held: bool) -> str:
    page = read("arithmetic")[operator]
    if held or rng.random() < 0.6:
        return str(rng.choice(split(page[lang]).get(held=held))).format(a=a, b=b)
    # The same words as for the tool, so that only the numbers tell whether a question is too hard.
    form = rng.choice(split(read("tools")["calculate"][lang], 3).trained)
    symbols = [operator, "×"] if operator == "*" else [operator]
    inner = [f"{a}{space}{symbol}{space}{b}" for symbol in symbols for space in ("", " ")]
    inner.append(f"{a} {page['word']['en']} {b}" if lang == "en" else f"{a}{page['word']['zh']}{b}")
    return form.format(rng.choice(inner))


def _pair_is_held(operator: str, a: int, b: int) -> bool:
    if operator == "*":
        return max(a, b) > _TABLE and is_held(f"{min(a, b)}*{max(a, b)}")
    return is_held(f"{a}{operator}{b}")


def _sum(question: str, operator: str, a: int, b: int) -> Sum:
    result = {"+": a + b, "-": a - b, "*": a * b}[operator]
    word = read("arithmetic")[operator]["word"]
    say: dict[Lang, str] = {
        "en": f"{a} {word['en']} {b} is {result}.",
        "zh": f"{a}{word['zh']}{b}等于{result}。",
    }
    if operator == "*" and max(a, b) > _TABLE:
        say = _long_product(a, b)
    return Sum(question, Answer(say=say, short={"en": f"{result}.", "zh": f"{result}。"}), result)


def _long_product(a: int, b: int) -> dict[Lang, str]:
    """Return a product beyond the table in words, step by step."""
    low, high = min(a, b), max(a, b)
    if low <= _TABLE:
        first, *rest = low * _TABLE, low * (high - _TABLE)
    else:
        first, *rest = high * _TABLE, (low - _TABLE) * _TABLE, (low - _TABLE) * (high - _TABLE)
    en, zh = [], []
    total = first
    for part in rest:
        total += part
        en.append(f"plus {part} is {total}")
        zh.append(f"加{part}等于{total}")
    return {"en": f"{a} times {b}: {first} {', '.join(en)}.", "zh": f"{a}乘{b}：{first}{'，再'.join(zh)}。"}
