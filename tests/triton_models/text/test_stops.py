import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triton_models.text.answer import StopStrings

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def directly(stops: list[str], text: str) -> tuple[str, str | None]:
    """Cut `text` where the first stop string to be completed begins."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stream = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stopped = stream.push(piece)
        shown += text
        if stopped is not None:
            return shown, stopped
    return shown + stream.finish(), None


@given(stop_lists, st.lists(letters, max_size=8))
@example(["aab"], ["aa", "ab"])
@example(["abab", "ba"], ["a", "b", "a"])
@example(["ab", "b"], ["ab"])
@example(["b", "ab"], ["a", "b"])
def test_any_cut_equals_the_search_in_the_joined_text(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == directly(stops, "".join(pieces))


@given(stop_lists, st.lists(letters, max_size=8))
def test_held_text_is_the_longest_possible_beginning(stops: list[str], pieces: list[str]) -> None:
    stream = StopStrings(stops)
    joined = shown = ""
    for piece in pieces:
        text, stopped = stream.push(piece)
        joined += piece
        shown += text
        if stopped is not None:
            return
        beginnings = [
            length for stop in stops for length in range(1, len(stop)) if joined.endswith(stop[:length])
        ]
        assert joined == shown + joined[len(shown) :]
        assert len(joined) - len(shown) == max(beginnings, default=0)


def test_without_stops_nothing_waits() -> None:
    assert StopStrings([]).push("abc") == ("abc", None)


def test_a_long_stop_string_is_found_in_linear_time() -> None:
    stop = "a" * 50_000 + "b"
    stream = StopStrings([stop])
    assert all(stream.push("a" * 100) == ("", None) for _ in range(500))
    assert stream.push("a") == ("a", None)
    assert stream.push("b!") == ("", stop)


def test_finishing_begins_anew() -> None:
    stream = StopStrings(["ab"])
    assert stream.push("xa") == ("x", None)
    assert stream.finish() == "a"
    assert stream.push("b") == ("b", None)
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
