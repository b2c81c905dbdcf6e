import pytest

from gateway.chat.answers import (
    AnswerPart,
    TextTokens,
    in_runs,
    pieces_of,
)
from gateway.core.events import CallPart, TokenLogprob

CALL = CallPart("now", "{}")


def token(utf8: bytes) -> TokenLogprob:
    return TokenLogprob(id=7, token=repr(utf8), utf8=utf8, logprob=-1.0, top=())


def tokens(*utf8: str | bytes) -> list[TokenLogprob]:
    return [token(each if isinstance(each, bytes) else each.encode()) for each in utf8]


def bytes_of(found: list[TokenLogprob]) -> list[bytes]:
    return [each.utf8 for each in found]


def shown(of: TextTokens, text: str) -> list[bytes]:
    of.read(text)
    return bytes_of(of.show())


def test_tokens_come_with_the_characters_that_begin_in_them() -> None:
    of = TextTokens()
    of.push(tokens("He", "llo", " you"))
    assert shown(of, "H") == [b"He"]
    assert shown(of, "e") == []
    assert shown(of, "llo") == [b"llo"]
    assert shown(of, " y") == [b" you"]


def test_a_character_of_several_tokens_has_them_all() -> None:
    of = TextTokens()
    smile = "🙂".encode()
    of.push([*tokens("a"), *(token(smile[place : place + 1]) for place in range(4)), *tokens("b")])
    assert shown(of, "a") == [b"a"]
    assert shown(of, "🙂") == [smile[place : place + 1] for place in range(4)]
    assert shown(of, "b") == [b"b"]


def test_a_byte_of_no_character_is_one_character() -> None:
    """The text has a U+FFFD for each."""
    of = TextTokens()
    of.push(tokens(b"\xff", b"\xe4", "a", b"\xe4\xbd", "", "b"))
    assert shown(of, "\ufffd") == [b"\xff"]
    assert shown(of, "\ufffda") == [b"\xe4", b"a"]
    assert shown(of, "\ufffd\ufffd") == [b"\xe4\xbd"]  # the token without text ended it
    assert shown(of, "b") == [b"", b"b"]


def test_a_role_token_ends_a_character_too() -> None:
    of = TextTokens()
    of.push(tokens("a", b"\xe4", "", "b", "", "c"))
    assert shown(of, "a\ufffd") == [b"a", b"\xe4"]
    assert of.next_segment() == []
    assert shown(of, "b") == [b"", b"b"]
    assert of.next_segment() == []
    of.read("c")
    of.call()
    assert of.finish() == []


@pytest.mark.parametrize("begun", [0, 1])
def test_a_role_token_may_come_with_its_segment_or_before_it(begun: int) -> None:
    of = TextTokens()
    of.push(tokens("a", "", "b")[: 1 + begun])
    assert shown(of, "a") == [b"a"]
    of.push(tokens("a", "", "b")[1 + begun :])
    assert of.next_segment() == []
    assert shown(of, "b") == [b"", b"b"]


@pytest.mark.parametrize("beginning", ["  ", " "])
def test_a_space_that_was_dropped_at_the_beginning_moves_nothing(beginning: str) -> None:
    of = TextTokens()
    of.push(tokens(" ", " ", "I", " ", "a", "m"))
    assert shown(of, f"{beginning}I") == [b" ", b" ", b"I"]
    assert shown(of, " a") == [b" ", b"a"]
    assert shown(of, "m") == [b"m"]


def test_what_shows_nothing_belongs_to_what_comes_next() -> None:
    of = TextTokens()
    of.push(tokens("\n", "", "now\n", "{}", "", "\n", "", "Hi"))
    of.read("\n")
    assert of.next_segment() == []
    of.read("now\n{}")
    of.call()
    assert of.next_segment() == []
    of.read("\n")
    assert of.next_segment() == []
    assert shown(of, "Hi") == [b"", b"\n", b"", b"Hi"]


def test_what_shows_nothing_at_the_end_belongs_to_what_came_last() -> None:
    for begun, kept in ((True, [b"", b"\n", b"STOP"]), (False, [])):
        of = TextTokens()
        of.push(tokens("Hi", "", "\n", "STOP"))
        of.read("Hi")
        if begun:
            of.show()
        else:
            of.call()
        of.next_segment()
        of.read("\n")
        assert bytes_of(of.finish()) == kept
    of = TextTokens()
    of.push(tokens("\n"))
    assert bytes_of(of.finish()) == [b"\n"]


def test_text_behind_a_call_begins_where_the_call_ends() -> None:
    of = TextTokens()
    of.push(tokens("now\n", "{", "}\n", "Do", "ne"))
    of.read("now\n{}\nDo")
    of.call(rest=3)
    assert bytes_of(of.show()) == [b"Do"]
    assert shown(of, "ne") == [b"ne"]


def test_the_beginning_of_a_call_that_is_left_out_has_no_tokens() -> None:
    of = TextTokens()
    of.push(tokens("Hi", "", "no", "w"))
    assert shown(of, "Hi") == [b"Hi"]
    of.next_segment()
    of.read("now")
    of.leave_out()
    assert of.finish() == []


def test_tokens_of_a_run_are_of_one_text() -> None:
    first, second, third = tokens("a", "b", "c")
    told: list[AnswerPart] = [first, CALL, CALL, "b", second, "c", third, CALL]
    assert list(in_runs(told)) == [
        ((CALL, CALL), (first,)),
        (("bc", CALL), (second, third)),
    ]
    assert list(in_runs([])) == [((), ())]
    assert pieces_of(told) == (CALL, CALL, "bc", CALL)
