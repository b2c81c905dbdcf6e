import codecs
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triton_models.text.answer import AnswerDelta, AnswerStream, Detokenizer, StopStrings
from triton_models.text.formats import ChatGLM3Format
from triton_models.text.tokenizers import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "golden" / "chatglm3", "chatglm3")
FORMAT = ChatGLM3Format(TOKENIZER)
ASSISTANT = TOKENIZER.special_ids["<|assistant|>"]
OPENED = "assistant"


def stream(stops: Sequence[str] = (), min_tokens: int = 0) -> AnswerStream:
    return AnswerStream(TOKENIZER, FORMAT, stops, min_tokens)


def push_all(answer: AnswerStream, ids: list[int]) -> list[AnswerDelta]:
    return [answer.push(token_id) for token_id in ids]


def text_of(deltas: list[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def segments_of(deltas: list[AnswerDelta]) -> list[str]:
    """Cut the joined text where the deltas say that a segment begins."""
    segments = [""]
    for delta in deltas:
        start = 0
        for at, role in delta.segments:
            assert role == OPENED
            segments[-1] += delta.text[start:at]
            segments.append("")
            start = at
        segments[-1] += delta.text[start:]
    return segments


def test_text_streams_and_special_ids_do_not() -> None:
    answer = stream()
    ids = TOKENIZER.encode("The question 👋")
    deltas = push_all(answer, [*ids[:2], TOKENIZER.special_ids["sop"], TOKENIZER.size + 5, *ids[2:]])
    assert text_of(deltas) == "The question 👋"
    assert deltas[0] == AnswerDelta("The")
    assert answer.finish() == AnswerDelta()
    assert answer.tokens == len(ids) + 2


def test_a_role_token_opens_a_segment_and_its_text_does_not() -> None:
    answer = stream()
    typed = TOKENIZER.encode("a <|assistant|>")
    deltas = push_all(answer, [*typed, ASSISTANT, *TOKENIZER.encode("b")])
    assert segments_of(deltas) == ["a <|assistant|>", "b"]
    assert [delta.segments for delta in deltas if delta.segments] == [((0, OPENED),)]


def test_text_held_for_a_stop_string_is_released_before_the_boundary() -> None:
    answer = stream(["server now"])
    assert text_of(push_all(answer, TOKENIZER.encode("the server"))) == "the "
    assert answer.push(ASSISTANT) == AnswerDelta("server", ((6, OPENED),))
    deltas = push_all(answer, TOKENIZER.encode("now"))
    assert (text_of(deltas), answer.finish().text) == ("now", "")


def test_a_character_cut_by_a_boundary_is_shown_as_broken() -> None:
    wide = TOKENIZER.encode("☃")[1:]
    assert stream().push(wide[0]) == AnswerDelta()
    assert segments_of(push_all(stream(), [*wide[:2], ASSISTANT, wide[2]])) == ["\ufffd\ufffd", "\ufffd"]


def test_a_character_cut_by_the_end_is_dropped() -> None:
    answer = stream()
    assert push_all(answer, TOKENIZER.encode("☃")[1:3]) == [AnswerDelta(), AnswerDelta()]
    assert answer.finish() == AnswerDelta()


def test_the_token_that_completes_a_stop_string_is_counted_and_what_follows_ignored() -> None:
    answer = stream(["question"])
    ids = TOKENIZER.encode("closes the question. Then")
    deltas = push_all(answer, ids)
    at = next(index for index, delta in enumerate(deltas) if delta.stopped)
    assert deltas[at].stopped == "question"
    assert text_of(deltas) == "closes the "
    assert answer.tokens == at + 1 < len(ids)
    assert deltas[at + 1 :] == [AnswerDelta()] * (len(ids) - at - 1)
    assert answer.finish() == AnswerDelta()


def test_white_space_before_a_segment_never_stops_it() -> None:
    blank_line = TOKENIZER.encode("\n")
    one_two = TOKENIZER.encode("one\ntwo")
    deltas = push_all(stream(["\n"]), [*blank_line, *one_two])
    assert text_of(deltas) == "\n one"
    assert [delta.stopped for delta in deltas if delta.stopped] == ["\n"]
    deltas = push_all(stream(["\n"]), [*one_two[:1], ASSISTANT, *blank_line, *one_two])
    assert segments_of(deltas) == ["one", "\n one"]


def test_text_of_the_first_min_tokens_never_stops() -> None:
    ids = TOKENIZER.encode("a\nb\nc")
    newline = ids.index(TOKENIZER.encode("\n")[-1])
    answer = stream(["\n"], min_tokens=newline + 2)
    deltas = push_all(answer, ids)
    assert text_of(deltas) == "a\nb"
    assert answer.tokens == ids.index(ids[newline], newline + 1) + 1
    exactly = stream(["\n"], min_tokens=newline + 1)
    assert text_of(push_all(exactly, ids)) == "a"


@pytest.mark.parametrize(("blank_start", "text"), [(False, ""), (True, "\na")])
def test_white_space_before_a_raw_answer_may_be_none_of_it(*, blank_start: bool, text: str) -> None:
    answer = AnswerStream(TOKENIZER, FORMAT, ["\n"], raw=True, blank_start=blank_start)
    assert text_of(push_all(answer, TOKENIZER.encode("\na\nb"))).lstrip(" ") == text


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    ids = TOKENIZER.encode("a\nb\nc")
    newline = ids.index(TOKENIZER.encode("\n")[-1])
    answer = stream(["\nb"], min_tokens=newline + 2)
    assert text_of(push_all(answer, ids)) == "a"
    assert answer.tokens == newline + 2


@given(
    st.lists(
        st.lists(
            st.integers(0, TOKENIZER.size + 40).filter(lambda token_id: token_id != ASSISTANT), max_size=6
        )
    ),
    st.lists(st.sampled_from(["the", " ", "\n", "a", "\ufffd\ufffd"]), max_size=2),
)
def test_segments_are_decoded_and_stopped_each_for_itself(
    segments: list[list[int]], stops: list[str]
) -> None:
    answer = stream(stops)
    ids = [token_id for segment in segments for token_id in [*segment, ASSISTANT]]
    deltas = push_all(answer, ids)
    stopped = any(delta.stopped for delta in deltas)
    deltas.append(answer.finish())
    shown = segments_of(deltas)
    # A role token follows each segment, so no character is left in flight.
    whole = [TOKENIZER.decode(segment) for segment in segments] + [""]
    assert shown[:-1] == whole[: len(shown) - 1]
    assert whole[len(shown) - 1].startswith(shown[-1])
    for segment in shown:
        assert not any(stop in segment.lstrip() for stop in stops)
    if not stopped:
        assert shown == whole


def test_a_raw_answer_keeps_its_first_space_and_has_no_segments() -> None:
    ids = [*TOKENIZER.encode("The question"), ASSISTANT, *TOKENIZER.encode("The question")]
    raw = AnswerStream(TOKENIZER, FORMAT, raw=True)
    deltas = push_all(raw, ids)
    assert text_of(deltas) == " The question The question"
    assert not any(delta.segments for delta in deltas)


def test_stop_strings_of_a_raw_answer_match_from_its_first_character() -> None:
    ids = TOKENIZER.encode("\nThe question")
    raw = AnswerStream(TOKENIZER, FORMAT, ["\n"], raw=True)
    deltas = push_all(raw, ids)
    assert [delta.stopped for delta in deltas if delta.stopped] == ["\n"]
    assert text_of(deltas).strip(" ") == ""
    assert all(delta.stopped is None for delta in push_all(stream(["\n"]), ids))


def test_stop_strings_match_from_the_first_character_where_the_first_line_is_in_the_prompt() -> None:
    answer = AnswerStream(TOKENIZER, FORMAT, ["\n"], metadata="")
    assert [each.stopped for each in push_all(answer, TOKENIZER.encode("\nThe")) if each.stopped] == ["\n"]


def test_what_follows_an_echo_without_text_keeps_its_space() -> None:
    answer = AnswerStream(TOKENIZER, FORMAT, raw=True, echoes=True)
    assert answer.echo([ASSISTANT]) == ""
    assert text_of(push_all(answer, TOKENIZER.encode("The question"))) == " The question"


def test_the_answer_ends_after_a_call() -> None:
    text, call = TOKENIZER.encode("\nwait"), TOKENIZER.encode("get\nx")
    ids = [*text, ASSISTANT, *call, ASSISTANT, *call]
    answer = AnswerStream(TOKENIZER, FORMAT, ["never"], min_tokens=999, end_after_call_of=["get"])
    deltas = push_all(answer, ids)
    assert segments_of(deltas) == ["\nwait", "get\nx"]
    assert [number for number, delta in enumerate(deltas, 1) if delta.ended] == [answer.tokens]
    assert answer.tokens == len(ids) - len(call)
    assert answer.finish() == AnswerDelta()


def test_the_answer_goes_on_after_a_call_of_something_else() -> None:
    call = TOKENIZER.encode("get\nx")
    for names in ((), ("other",), ("ge",)):
        answer = AnswerStream(TOKENIZER, FORMAT, end_after_call_of=names)
        assert segments_of(push_all(answer, [*call, ASSISTANT, *call])) == ["get\nx", "get\nx"]


def test_a_call_whose_name_was_part_of_the_prompt_ends_the_answer() -> None:
    ids = [*TOKENIZER.encode("x"), ASSISTANT, *TOKENIZER.encode("y")]
    answer = AnswerStream(TOKENIZER, FORMAT, metadata="get", end_after_call_of=["get"])
    assert text_of(push_all(answer, ids)) == "x"
    answer = AnswerStream(TOKENIZER, FORMAT, metadata="", end_after_call_of=["get"])
    assert text_of(push_all(answer, ids)) == "xy"


BYTES = {value: 3 + value for value in range(256)}
SPACE = TOKENIZER.encode(" ")[0]

byte_ids = st.sampled_from(sorted(BYTES.values()))
# Valid characters cut apart, invalid bytes, pieces, spaces, control, special and meaningless ids.
ids = st.lists(
    st.one_of(
        st.integers(0, TOKENIZER.size + 60).map(lambda token_id: [token_id]),
        st.just([SPACE]),
        st.text(max_size=3).map(
            lambda text: [BYTES[value] for value in text.encode("utf-8", "surrogatepass")][:5]
        ),
        st.lists(byte_ids, max_size=4),
    ),
    max_size=12,
).map(lambda groups: [token_id for group in groups for token_id in group])


def incomplete(token_ids: list[int]) -> int:
    """Return how many ids at the end are the beginning of a character that could still become whole."""
    for length in range(min(3, len(token_ids)), 0, -1):
        pieces = [TOKENIZER.piece(token_id) for token_id in token_ids[-length:]]
        utf8 = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        if len(utf8) == length and could_begin_a_character(utf8):
            return length
    return 0


def could_begin_a_character(utf8: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(utf8) == "" and decoder.getstate()[0] == utf8
    except UnicodeDecodeError:
        return False


@given(ids)
@example([SPACE, SPACE])
@example([SPACE, 1, SPACE])
@example([1, SPACE])
@example([BYTES[0x20], SPACE])
@example([BYTES[0xE4], SPACE])
@example([BYTES[0xE4], BYTES[0xBD], BYTES[0xE4], BYTES[0xBD], BYTES[0xA0]])
@example([BYTES[0xED], BYTES[0xA0], BYTES[0x80]])
@example([BYTES[0xE4], TOKENIZER.size + 1, BYTES[0xBD], BYTES[0xA0]])
def test_joined_pieces_equal_decoding_at_one_go(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    joined = "".join(detokenizer.push(token_id) for token_id in token_ids)
    whole = TOKENIZER.decode(token_ids)
    dropped = incomplete(token_ids)
    assert whole.endswith("\ufffd" * dropped)
    assert joined == whole[: len(whole) - dropped]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2581"), max_size=30))
def test_a_character_in_flight_never_shows(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    joined = ""
    for token_id in TOKENIZER.encode(text):
        joined += detokenizer.push(token_id)
        assert text.startswith(joined)
    assert joined == text


def test_text_comes_as_soon_as_it_is_whole() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token_id) for token_id in TOKENIZER.encode("👋a")] == ["", "", "", "", "👋", "a"]


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_every_piece_alone(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    for token_id in range(tokenizer.size):
        if not isinstance(tokenizer.piece(token_id), bytes):
            assert Detokenizer(tokenizer).push(token_id) == tokenizer.decode([token_id])


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


@given(stop_lists, st.lists(letters, max_size=8), st.integers(0, 8))
@example(["aa"], ["aaa", "a"], 1)
def test_what_is_complete_too_early_is_text(stops: list[str], pieces: list[str], early: int) -> None:
    stream = StopStrings(stops)
    joined = "".join(pieces[:early])
    shown = "".join(stream.push(piece, ignore=True)[0] for piece in pieces[:early])
    for piece in pieces[early:]:
        text, stopped = stream.push(piece)
        shown += text
        for letter in piece:
            joined += letter
            found = max((stop for stop in stops if joined.endswith(stop)), key=len, default=None)
            if found is not None:
                assert (shown, stopped) == (joined.removesuffix(found), found)
                return
        assert stopped is None
    assert shown + stream.finish() == joined


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
