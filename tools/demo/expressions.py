"""Generates arithmetic expressions for the tool `calculate`, and ones that are too hard without it."""

import random
from dataclasses import dataclass
from fractions import Fraction

from tools.demo.arithmetic import is_held, operands
from tools.demo.pages import read
from tools.demo.values import LARGEST_FACTOR, LARGEST_TERM, Lang


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression as the user writes it, as the tool is called with it, and its result."""

    asked: str
    called: str
    result: str


def expression(rng: random.Random, lang: Lang, *, held: bool, hard: bool = False) -> Expression:
    """Return a random expression. `held`: one never trained on; `hard`: none that is learned by heart."""
    while True:
        if rng.random() < 0.25:
            operator = rng.choice("+-*")
            left, right = (str(each) for each in operands(rng, operator))
        else:
            operator = rng.choice("+-*/")
            left, right = _number(rng), _number(rng)
        write = rng.choices((_in_words, _in_symbols, _percent), (5, 14, 1))[0]
        found = write(rng, lang, left, operator, right)
        if found is None or (hard and _is_small_sum(found.called)):
            continue
        if is_held(found.called.replace(" ", "")) == held:
            return found


def evaluate(text: str) -> Fraction:
    """Evaluate an expression of numbers, + - * / and parentheses, by precedence climbing.

    Raises:
        ZeroDivisionError: the expression divides by zero.
    """
    tokens = _tokens(text)

    def operand() -> Fraction:
        first = tokens.pop(0)
        if first != "(":
            return Fraction(first)
        inside = climb(0)
        tokens.pop(0)
        return inside

    def climb(least: int) -> Fraction:
        left = operand()
        while tokens and tokens[0] in "+-*/" and _precedence(tokens[0]) >= least:
            operator = tokens.pop(0)
            right = climb(_precedence(operator) + 1)
            match operator:
                case "+":
                    left += right
                case "-":
                    left -= right
                case "*":
                    left *= right
                case _:
                    left /= right
        return left

    return climb(0)


def _number(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return f"{rng.randint(0, 99)}.{rng.randint(1, 99)}"
    return str(rng.randint(0, 10 ** rng.randint(1, 5)))


def _in_words(rng: random.Random, lang: Lang, left: str, operator: str, right: str) -> Expression | None:
    space = " " if lang == "en" or rng.random() < 0.2 else ""
    asked, called = left, left
    for symbol, number in ((operator, right), (rng.choice("+-*/"), _number(rng))):
        asked += space + _word(rng, lang, symbol) + space + number
        called += f" {symbol} {number}"
        if rng.random() < 0.75:
            break
    return _expression(asked, called)


def _percent(_rng: random.Random, lang: Lang, left: str, _operator: str, right: str) -> Expression | None:
    asked = f"{left}% of {right}" if lang == "en" else f"{right}的{left}%"
    return _expression(asked, f"{left} / 100 * {right}")


def _word(rng: random.Random, lang: Lang, operator: str) -> str:
    if operator == "/":
        return "divided by" if lang == "en" else "除以"
    if operator == "*" and lang == "zh" and rng.random() < 0.6:
        return "乘以"
    return str(read("arithmetic")[operator]["word"][lang])


def _in_symbols(rng: random.Random, _lang: Lang, left: str, operator: str, right: str) -> Expression | None:
    space = rng.choice(("", " "))
    text = space.join((left, operator, right))
    for _ in range(rng.choices((0, 1, 2), (4, 3, 1))[0]):
        other = rng.choice("+-*/")
        if rng.random() < 0.6:
            text = f"({text})"
        terms = (text, _number(rng)) if rng.random() < 0.6 else (_number(rng), text)
        text = f"{terms[0]}{space}{other}{space}{terms[1]}"
    asked = text.replace("*", "×").replace("/", "÷") if rng.random() < 0.25 else text
    return _expression(asked, text)


def _expression(asked: str, called: str) -> Expression | None:
    try:
        value = evaluate(called)
    except ZeroDivisionError:
        return None
    number = str(value) if value.denominator == 1 else f"{float(value):.4f}".rstrip("0").rstrip(".")
    return Expression(asked, called, number)


def _is_small_sum(called: str) -> bool:
    """Return whether the expression is a small sum, difference or product, like those learned by heart."""
    tokens = _tokens(called)
    if len(tokens) != len("a+b") or tokens[1] == "/" or "." in tokens[0] + tokens[2]:
        return False
    return max(int(tokens[0]), int(tokens[2])) <= (LARGEST_FACTOR if tokens[1] == "*" else LARGEST_TERM)


def _precedence(operator: str) -> int:
    return 1 if operator in "*/" else 0


def _tokens(text: str) -> list[str]:
    for symbol in "+-*/()":
        text = text.replace(symbol, f" {symbol} ")
    return text.split()
