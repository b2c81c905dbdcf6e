from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from triton_models.text.answer import AnswerDelta, AnswerStream
from triton_models.text.formats import ChatGLM3Format
from triton_models.text.tokenizers import load_tokenizer

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
