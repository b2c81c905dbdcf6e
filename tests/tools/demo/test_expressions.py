import random
from fractions import Fraction

import pytest

from tools.demo.expressions import evaluate, expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", Fraction(7)),
        ("(1 + 2) * 3", Fraction(9)),
        ("10 - 4 - 3", Fraction(3)),
        ("2 / 4 * 2", Fraction(1)),
        ("7 - (2 - (1 - 3))", Fraction(3)),
        ("0.5*3", Fraction(3, 2)),
    ],
)
def test_the_value_follows_precedence(text: str, value: Fraction) -> None:
    assert evaluate(text) == value


def test_division_by_zero_is_no_expression() -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate("1 / (2 - 2)")


def test_what_is_called_is_what_was_asked() -> None:
    rng = random.Random(2)
    for _ in range(500):
        found = expression(rng, "en", held=False)
        words = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "% of": " / 100 *"}
        asked = found.asked.replace("×", "*").replace("÷", "/")
        for word, symbol in words.items():
            asked = asked.replace(word, symbol)
        assert asked == found.called
        assert float(found.result) == pytest.approx(float(evaluate(found.called)), abs=1e-4)


def test_a_hard_one_is_beyond_what_is_known_by_heart() -> None:
    rng = random.Random(3)
    for _ in range(500):
        called = expression(rng, "zh", held=False, hard=True).called.replace(" ", "")
        digits = called.replace("+", " ").replace("-", " ").replace("*", " ").split()
        assert len(digits) != 2 or not all(each.isdigit() and int(each) <= 20 for each in digits), called
