import pytest

from gateway.errors import InvalidRequestError
from gateway.openai.patterns import REPEATS_LIMIT, patterns_of, repeats
from gateway.openai.structured import grammar_of


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 1),
        ("a{7}", 7),
        ("a{2,7}b{3,5}", 7),
        ("a{7,}", 7),
        ("a{0}", 1),
        ("(a{1,1000}){1,1000}", 1_000_000),
        ("((a{2}){3}b{100}){4}", 400),
        ("(?:a{2}|(b{3})+){5}", 15),
        ("a{2}{3}", 6),
        (r"(\{9\}[{9}a(]\p{Lu}\x{41}{2}){3}", 6),
        (r"[]a)]{4}([\]{8}]){2}", 4),
        ("a)b{3}(", 3),
        ("[[:alpha:]]{5}", 5),
        (r"{x}{,3}", 1),
    ],
)
def test_repetitions_multiply(pattern: str, count: int) -> None:
    assert repeats(pattern) == count


def test_patterns_of_a_schema_are_found_anywhere() -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "a"}},
        "anyOf": [{"patternProperties": {"b": {"items": {"pattern": "c"}}}}],
    }
    assert sorted(patterns_of(schema)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("regex", "(a{1,1000}){1,1000}"),
        ("json", {"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
        ("json", '{"type": "string", "pattern": "((a{99}){99}){99}"}'),
    ],
)
def test_what_multiplies_too_far_is_refused_by_name(way: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {REPEATS_LIMIT}") as refused:
        grammar_of(way, value, f"structured_outputs.{way}")
    assert refused.value.param == f"structured_outputs.{way}"


def test_usual_expressions_are_not() -> None:
    for pattern in (r"(\w{1,200} ){1,200}", r"\d{4}-\d{2}-\d{2}", "a{1,9999}b{1,9999}", ".*"):
        assert grammar_of("regex", pattern, "structured_outputs.regex") is not None


def test_the_time_that_it_takes_grows_with_the_length_alone() -> None:
    assert repeats("(" * 100_000 + "a{9}" + "){9}" * 20) > REPEATS_LIMIT
    for part in ("[", "{", "\\p{", "[^]", "[\\", "{9", "[[:a"):
        assert repeats(part * 100_000) == 1
    assert repeats("a" + "{9}" * 100_000) == 10**12
    assert repeats("a{" + "9" * 100_000 + "}") == 1  # no number that anything takes
