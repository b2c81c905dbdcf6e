import math

from bench.gpu.same_text import Token, compare, parting_margin

WANTED = [Token("a", 3.0), Token("b", 0.01), Token("c", 2.0)]


def test_equal_answers_do_not_part() -> None:
    assert parting_margin([Token("a", 2.9), Token("b", 0.02), Token("c", 2.0)], WANTED) is None


def test_the_margin_is_the_references_where_the_answers_part() -> None:
    assert parting_margin([Token("a", 2.9), Token("x", 0.02)], WANTED) == 0.01


def test_an_answer_that_only_ends_earlier_parts_too() -> None:
    assert math.isnan(parting_margin(WANTED[:2], WANTED) or 0.0)


def test_answers_are_counted() -> None:
    row = compare("gpu", [WANTED, [Token("z", 1.0)]], [WANTED, WANTED])
    assert (row.equal, row.largest_margin) == ("1 of 2", 3.0)
