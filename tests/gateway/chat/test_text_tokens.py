"""What is listed of an answer's tokens: their bytes, joined, are its text."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.answers import AnswerText, RawText, ToolText
from gateway.chat.calls import FencedCallReader
from gateway.chat.marked import MarkedChoice, MarkedText
from gateway.chat.styles import STYLES
from gateway.chat.text_tokens import TextTokens
from gateway.core.events import CallPart, Piece, Reasoning, TokenLogprob, text_in
from wire.calls import write_fenced
from wire.meta import Segment

HERMES = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def token(utf8: str | bytes, name: str | None = None) -> TokenLogprob:
    utf8 = utf8.encode() if isinstance(utf8, str) else utf8
    return TokenLogprob(id=7, token=repr(utf8) if name is None else name, utf8=utf8, logprob=-1.0, top=())


def tokens(*utf8: str | bytes) -> list[TokenLogprob]:
    return [token(each) for each in utf8]


NONE: list[tuple[int, int]] = []
ROLE = token("", "<|assistant|>")


def taken(
    of: TextTokens, *pieces: Piece, hidden: list[tuple[int, int]] = NONE, over: bool = False
) -> list[bytes]:
    """Return what the next tokens add to the text."""
    return [each.utf8 for _, found in of.take(pieces, hidden, over=over) for each in found]


def test_a_token_is_listed_once_all_of_it_is_decided() -> None:
    of = TextTokens()
    of.push("Hello you", tokens("He", "llo", " you"))
    assert taken(of, "H") == []
    assert taken(of, "ello") == [b"He", b"llo"]
    assert taken(of, " you") == [b" you"]
    assert taken(of, over=True) == []


def test_white_space_that_is_stripped_has_no_tokens() -> None:
    of = TextTokens()
    of.push("\n Hello \n", tokens("\n", " Hello", " \n"))
    assert taken(of, "Hello") == [b"Hello"]
    assert taken(of, over=True) == []


def test_a_token_of_which_a_part_is_text_keeps_its_name() -> None:
    of = TextTokens()
    of.push("ends he", tokens("ends", " here"))
    assert taken(of, "ends") == [b"ends"]
    assert taken(of, " h") == []
    ((_, (last,)),) = of.take((), [], over=True)
    assert (last.token, last.utf8) == ("b' here'", b" h")


def test_a_character_of_several_tokens_has_them_all() -> None:
    of = TextTokens()
    smile = "🙂".encode()
    parts = [smile[place : place + 1] for place in range(4)]
    of.push("a", tokens("a", *parts[:3]))
    assert taken(of, "a") == [b"a"]
    assert taken(of, "") == []
    of.push("🙂b", tokens(parts[3], "b"))
    assert taken(of, "🙂b") == [*parts, b"b"]


def test_a_character_that_never_was_whole_is_not_listed() -> None:
    of = TextTokens()
    of.push("a", tokens("a", "🙂".encode()[:2]))
    assert taken(of, "a", over=True) == [b"a"]


def test_a_byte_of_no_character_is_one_character() -> None:
    """The text has a U+FFFD for each."""
    of = TextTokens()
    raw = "\ufffd\ufffda\ufffd\ufffdb\ufffd"
    of.push(raw, [*tokens(b"\xff", b"\xe4", "a", b"\xe4\xbd"), ROLE, *tokens("b", "\ufffd")])
    listed = taken(of, raw)
    assert (len(listed), b"".join(listed).decode()) == (6, raw)


@pytest.mark.parametrize(
    ("utf8", "listed"),
    [
        ((b"\xef\xbc", "b", "，"), ("��", "b", "，")),
        ((b"\xef", b"\x82", "。"), ("�", "�", "。")),
        ((b"a\xef", "，"), ("a�", "，")),
        (("�", b"\xef", "�"), ("�", "�", "�")),
        ((b"\xef", b"\xbf\xbd", "b"), (b"\xef", b"\xbf\xbd", "b")),
    ],
)
def test_such_a_byte_may_begin_what_stands_for_it(
    utf8: Sequence[str | bytes], listed: Sequence[str | bytes]
) -> None:
    """It is not looked for in later characters, of which a stream has fewer than a whole answer."""
    of, expected = TextTokens(), [each.utf8 for each in tokens(*listed)]
    raw = b"".join(expected).decode()
    of.push(raw, tokens(*utf8))
    assert taken(of, raw, over=True) == expected


def test_special_tokens_are_listed_where_they_are_text() -> None:
    for special in (False, True):
        of = TextTokens(special=special)
        of.push("a<|assistant|>b" if special else "ab", [token("a"), ROLE, token("b")])
        listed = taken(of, "a<|assistant|>b" if special else "ab")
        assert listed == ([b"a", b"<|assistant|>", b"b"] if special else [b"a", b"b"])


def test_what_is_put_between_segments_is_of_the_token_behind_it() -> None:
    of = TextTokens()
    of.push("Hi Done", [*tokens("Hi"), ROLE, *tokens(" Done")])
    assert taken(of, "Hi\nDone") == [b"Hi", b"\nDone"]


def test_the_date_is_of_the_placeholders_tokens() -> None:
    of = TextTokens()
    of.push("In [[训练时间]].", tokens("In ", "[[", "训练", "时间", "]].", ""))
    assert taken(of, "In 2023年.") == [b"In ", b"20", "23年".encode(), b"", b"."]


def test_a_call_and_reasoning_have_no_tokens() -> None:
    of = TextTokens()
    of.push("(Hm)Hi {} You", tokens("(", "Hm)", "Hi", " {", "} You"))
    hidden = [(0, 4), (7, 9)]
    pieces = (Reasoning("Hm"), "Hi", CallPart("now", "{}"), " You")
    runs = of.take(pieces, hidden)
    assert [run for run, _ in runs] == [pieces[:3], pieces[3:]]
    assert [[each.utf8 for each in found] for _, found in runs] == [[b"Hi"], [b" You"]]
    assert hidden == []


def test_a_token_that_a_call_ends_is_listed_before_the_call() -> None:
    of = TextTokens()
    of.push("Hi {}", tokens("Hi {", "}"))
    assert taken(of, "Hi", CallPart("now", "{}"), hidden=[(3, 5)]) == [b"Hi"]


def test_backends_leave_spaces_out_of_tokens() -> None:
    """Tokens that are decoded one by one have no space at their beginning."""
    of = TextTokens()
    of.push("Hello world, you", tokens("Hello", "world", ",", "you"))
    ((_, listed),) = of.take(("Hello world, you",), [])
    assert [each.utf8 for each in listed] == [b"Hello", b" world", b",", b" you"]
    assert [each.token for each in listed][1] == "b'world'"


def test_backends_leave_tokens_out_of_the_text() -> None:
    of = TextTokens()
    of.push("Hello you", tokens("Hello", "<|eom|>", " you", "<|end|>"))
    assert taken(of, "Hello you", over=True) == [b"Hello", b" you"]


def test_tokens_without_a_name_are_of_the_next_character() -> None:
    for last in (token("€", "€"), token("", "\ufffd")):
        of = TextTokens()
        of.push("a", [token("a"), token("", ""), token("", "\ufffd")])
        assert taken(of, "a") == [b"a"]
        of.push("€b", [last, token("b")])
        found = taken(of, "€b")
        assert (len(found), b"".join(found)) == (4, "€b".encode())


def test_bytes_of_no_character_are_of_tokens_without_a_name() -> None:
    """As vLLM has it: the tokens have neither a name nor bytes, and the text has U+FFFD for them."""
    of = TextTokens()
    of.push(
        "\ufffdth\ufffd\u00e9", [token("", ""), token("th"), token("", ""), token("\u00e9"), token("", "")]
    )
    assert taken(of, "\ufffdth\ufffd\u00e9", over=True) == [
        each.encode() for each in ("\ufffd", "th", "\ufffd", "\u00e9")
    ]


def test_a_token_that_is_late_owns_the_space_before_it() -> None:
    """A backend holds text back that may begin a stop string."""
    of = TextTokens()
    of.push("Hi ", tokens("Hi", "you"))
    assert taken(of, "Hi ") == [b"Hi"]
    of.push("you")
    assert taken(of, "you", over=True) == [b" you"]


def test_a_token_without_a_name_has_the_last_character_of_an_answer() -> None:
    of = TextTokens()
    of.push("a€", [token("a"), token("", ""), token("", "\ufffd"), token("<|eom|>")])
    assert taken(of, "a€", over=True) == [b"a", b"", "€".encode()]


def test_text_without_a_token_is_of_the_next_one() -> None:
    of = TextTokens()
    of.push("- ")
    assert taken(of, "- ") == []
    of.push("Hi", tokens("Hi"))
    assert taken(of, "Hi") == [b"- Hi"]


class Plain:
    """An answer of text alone, as the others are read."""

    def __init__(self, text: AnswerText | RawText) -> None:
        self._text = text
        self.hidden: list[tuple[int, int]] = []

    def push(self, text: str, segments: Sequence[Segment]) -> tuple[Piece, ...]:
        return (self._text.push(text, segments),)

    def finish(self) -> tuple[Piece, ...]:
        return (self._text.finish(),)


def reader_of(name: str) -> Plain | ToolText | MarkedChoice:
    match name:
        case "plain" | "raw":
            return Plain(AnswerText() if name == "plain" else RawText(segments=True))
        case "tools" | "constrained":
            return ToolText(["now"], FencedCallReader, constrained=name == "constrained")
        case _:
            return MarkedChoice(MarkedText(STYLES[name], ["now"], thinks=True))


WORDS = st.sampled_from(
    [
        *(
            "now\n " + write_fenced({"city": "京"}),
            "now\n",
            "now\n{}",
            "{",
            '{"a": ',
            "[[训练时间]]",
            "[[训练",
        ),
        *(HERMES, HERMES[:20], "<think>Hm 🙂.</think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>"),
        *(" ", "  ", "\n", "\n ", "x", "Hi", "你好", "🙂", "2023年", "."),
    ]
)
SEGMENTS = st.lists(st.lists(WORDS, max_size=4).map("".join), min_size=1, max_size=3)


def cut(text: bytes, widths: Sequence[int]) -> Iterator[bytes]:
    """Cut `text` into tokens of these widths, over and over."""
    number = at = 0
    while at < len(text):
        width = widths[number % len(widths)]
        yield text[at : at + width]
        number, at = number + 1, at + width


@given(
    name=st.sampled_from(["plain", "raw", "tools", "constrained", *STYLES]),
    segments=SEGMENTS,
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    stop=st.none() | st.integers(0, 80),
)
def test_the_tokens_bytes_are_the_text(
    name: str, segments: list[str], widths: list[int], cuts: list[int], stop: int | None
) -> None:
    """However tokens, deltas and a stop string cut the answer."""
    marked = name in STYLES
    segments = segments[:1] if marked else segments
    made = [piece for segment in segments for piece in (ROLE, *tokens(*cut(segment.encode(), widths)))][1:]
    whole = "".join(segments)[:stop]
    starts = [sum(map(len, segments[:number])) for number in range(1, len(segments))]
    starts = [start for start in starts if start <= len(whole)]

    def listed(cuts: Sequence[int]) -> list[tuple[str, list[bytes]] | None]:
        reader, of = reader_of(name), TextTokens()
        told: list[tuple[str, list[bytes]] | None] = [("", [])]
        bounds = [0, *sorted(each % (len(whole) + 1) for each in cuts), len(whole)]
        of.push("", made)
        for number, (begin, end) in enumerate(pairwise(bounds)):
            last = number == len(bounds) - 2
            here = [at for at in starts if begin <= at < end or (last and at == end)]
            of.push(whole[begin:end])
            pieces = reader.push(whole[begin:end], [Segment(at - begin, "a") for at in here])
            pieces += reader.finish() if last else ()
            for run, tokens in of.take(pieces, reader.hidden, over=last):
                text, found = told[-1] or ("", [])
                told[-1] = (text + text_in(run), found + [each.utf8 for each in tokens])
                if run and isinstance(run[-1], CallPart):
                    told.append(None)
        return [each for each in told if each != ("", [])]

    once = listed(())
    assert "".join(text for text, _ in filter(None, once)).encode() == b"".join(
        each for _, found in filter(None, once) for each in found
    )
    every = listed(range(len(whole) + 1))
    assert [each for each in listed(cuts) if each] == [each for each in once if each]
    assert [each for each in every if each] == [each for each in once if each]
