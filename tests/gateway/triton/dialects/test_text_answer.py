"""Answers of text backends as events: reasoning, calls and text apart, and what is counted."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.chat.styles import STYLES
from gateway.chat.vocabulary import Vocabulary
from gateway.core.events import Accepted, CallPart, Delta, Event, Reasoning, TokenLogprob, joined_pieces
from gateway.core.request import Generation
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.text_answer import Growth, News, TextAnswer, limit_of

THOUGHT = "<think>Hm.</think>"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"}}</tool_call>'
BERLIN = CallPart("weather", '{"city": "Berlin"}')


def by_character() -> Vocabulary:
    words = {token: id_ for id_, token in enumerate([*map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return Vocabulary(tokenizer)


MODEL = ModelText(vocabulary=by_character(), style=STYLES["hermes"], thinks=True)


def answer(*, thinking: bool = False, cut_stops: bool = True, **changes: Any) -> TextAnswer:
    prompt = RenderedPrompt("Hi", 2, tools=("weather",), thinks=True, thinking=thinking, converses=True)
    generation = Generation(request_id="r", model="m", prompt=prompt, deadline=0, **changes)
    return TextAnswer(generation, MODEL, prompt, cut_stops=cut_stops, limit=limit_of(generation))


def deltas(events: Sequence[Event]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


def read(text: str, cuts: Sequence[int] = (), *, finish: str | None = None, **changes: Any) -> list[Delta]:
    reader = answer(**changes)
    events: list[Event] = []
    for begin, end in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        events += reader.take(News(text=text[begin:end], finish=finish if end == len(text) else None))
    return deltas([*events, *reader.end()])


@given(
    text=st.lists(st.sampled_from([THOUGHT, CALL, "END", "<think>", "E", " ", "x"]), max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_an_answer_does_not_depend_on_how_it_came(text: str, cuts: list[int]) -> None:
    def whole(found: list[Delta]) -> Any:
        last = found[-1]
        pieces = joined_pieces(piece for delta in found for piece in delta.pieces)
        assert last.usage is not None
        return pieces, last.finish_reason, last.stop_reason, last.usage.reasoning_tokens

    assert whole(read(text, cuts, stop=["END"])) == whole(read(text, stop=["END"]))


def test_reasoning_is_counted_without_its_marks() -> None:
    first, last = read(THOUGHT + "Two.")
    assert first.pieces == (Reasoning("Hm."), "Two.")
    assert (first.text, first.reasoning) == ("Two.", "Hm.")
    assert last.usage is not None
    assert (last.usage.reasoning_tokens, last.usage.completion_tokens) == (3, len(THOUGHT + "Two."))
    assert first.tokens + last.tokens == last.usage.completion_tokens


@pytest.mark.parametrize("text", ["<think></think>Two.", "<think>\n\n</think>\n\nTwo.", "Two."])
def test_there_may_be_no_reasoning(text: str) -> None:
    assert joined_pieces(piece for delta in read(text) for piece in delta.pieces) == ("Two.",)


def test_reasoning_that_the_limit_ends() -> None:
    first, last = read("Hm, hm", thinking=True, finish="length")
    assert (first.pieces, last.finish_reason) == ((Reasoning("Hm, hm"),), "length")
    assert last.usage is not None
    assert last.usage.reasoning_tokens == 6


def test_a_call_behind_reasoning() -> None:
    first, last = read(THOUGHT + "\n\n" + CALL)
    assert (first.pieces, last.finish_reason) == ((Reasoning("Hm."), BERLIN), "tool_calls")


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (CALL, "length", "length"),
        (CALL[:-20], "length", "length"),
        (CALL[:-20], "stop", "stop"),
        (CALL, "stop", "tool_calls"),
    ],
)
def test_only_whole_calls_are_a_reason_to_finish(text: str, finish: str, reason: str) -> None:
    assert read(text, finish=finish)[-1].finish_reason == reason


def test_a_stop_string_within_a_call_cuts_it() -> None:
    *_, last = found = read(CALL, stop=["Berl"])
    assert joined_pieces(piece for delta in found for piece in delta.pieces) == (
        CallPart("weather", '{"city": "'),
    )
    assert (last.finish_reason, last.stop_reason) == ("stop", "Berl")


def logprobs(tokens: Sequence[str]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(id=7, token=each, utf8=each.encode(), logprob=-1.0, top=()) for each in tokens)


@pytest.mark.parametrize("by", [1, 3, 1000])
def test_log_probabilities_are_those_of_the_text(by: int) -> None:
    tokens = ["<think>", "Hm", ".", "</think>", "Let", " me", " look.", *CALL, " Done", "."]
    reader = answer(logprobs=0, cut_stops=False)
    events: list[Event] = []
    for at in range(0, len(tokens), by):
        some = tokens[at : at + by]
        events += reader.take(News(text="".join(some), tokens=len(some), logprobs=logprobs(some)))
    listed = [each.token for delta in deltas([*events, *reader.end()]) for each in delta.logprobs or ()]
    assert listed == ["Let", " me", " look.", " Done", "."]


@pytest.mark.parametrize("by", [1, 2, 1000])
@pytest.mark.parametrize(
    ("stop", "include", "listed"),
    [
        (" bc", False, [b"Two", b" "]),
        (" bc", True, [b"Two", b"  bc"]),
        ("cd", False, [b"Two", b"  b"]),
        ("bcd", True, [b"Two", b"  bc", b"d"]),
    ],
)
def test_a_stop_string_has_log_probabilities_where_it_is_text(
    stop: str, include: bool, listed: list[bytes], by: int
) -> None:
    reader = answer(logprobs=0, stop=(stop,), include_stop=include)
    events: list[Event] = []
    tokens = ["Two", "  bc", "d ", "e"]
    for at in range(0, len(tokens), by):
        some = tokens[at : at + by]
        events += reader.take(News(text="".join(some), tokens=len(some), logprobs=logprobs(some)))
    events += reader.end()
    assert [each.utf8 for delta in deltas(events) for each in delta.logprobs or ()] == listed
    assert "".join(delta.text for delta in deltas(events)) == b"".join(listed).decode()


def test_without_a_request_for_them_there_are_none() -> None:
    assert all(delta.logprobs is None for delta in read("Two."))


@pytest.mark.parametrize("texts", [["a", "ab", "abc"], ["a", "b", "c"], ["abc"], ["", "abc"]])
def test_text_so_far_and_deltas_are_told_apart(texts: list[str]) -> None:
    growth = Growth()
    assert "".join([*map(growth.push, texts), growth.end()]) == "abc"


def grown(texts: Sequence[str], before: str | None = "") -> str:
    growth = Growth(before)
    return "".join([*map(growth.push, texts), growth.end()])


@pytest.mark.parametrize("before", ["", "What is one and one?", "Hi", None])
@pytest.mark.parametrize(
    "texts",
    [
        ["2", "2", "2", ""],
        ["2", "2", "2"],
        ["2", "2", ""],
        ["哈", "哈", "哈", "，", "好的", ""],
        ["-"] * 30,
        ["1", "10", " = ", "110"],
        ["\ufffd", "\ufffd", "one", " two"],
        ["Hi", " there", "."],
        ["one", " two", " three"],
    ],
)
def test_deltas_may_repeat_or_begin_with_what_came_before(texts: list[str], before: str | None) -> None:
    assert grown(texts, before) == "".join(texts)


@pytest.mark.parametrize("echoed", [True, False])
@pytest.mark.parametrize("before", ["", "What is one and one?", "Hi"])
@pytest.mark.parametrize(
    "texts",
    [
        ["one", "one two", "one two three"],
        ["one", "one two", "one two three", "one two three"],
        ["Yes", "Yes"],
        ["", "Hel", "Hello"],
        ["Sure: ", "Sure: ", "Sure: ", "Sure: ", "Sure: 😀", "Sure: 😀!"],
        ["Sure: ", "Sure: \ufffd", "Sure: 😀", "Sure: 😀!"],
        ["Sure, here it is: ", "Sure, here it is: \ufffd", "Sure, here it is: 😀"],
        ["我", "我\ufffd", "我\ufffd\ufffd", "我鑫", "我鑫。"],
        ["\ufffd", "你", "你\ufffd", "你好", "你好吗"],
        ["\ufffd", "😀"],
        ["one", "one two", "one two three", "one two three \ufffd", "one two three 😀", "one two three 😀!"],
        ["one", "one\ufffd", "one\ufffd two", "one\ufffd two three"],
        ["one", "one two", "one two \ufffd"],
        ["one", "one \ufffd", "one \ufffd\ufffd"],
        ["one\ufffd"],
    ],
)
def test_text_so_far_is_never_taken_for_deltas(texts: list[str], before: str, *, echoed: bool) -> None:
    whole = max(texts, key=lambda text: len(text.rstrip("\ufffd")) + len(text) / 100)
    assert grown([before + text for text in texts] if echoed else texts, before) == whole


@pytest.mark.parametrize(
    ("texts", "returned"),
    [
        (["one", " two", " two", ""], ["one", " two", " two", "", ""]),
        (["2", "2", "3", "3"], ["2", "", "23", "3", ""]),
        (["-"] * 11, ["-", *[""] * 7, "-" * 8, "-", "-", ""]),
        (["one", "one two", "one two three", "one two three!"], ["one", "", " two three", "!", ""]),
        (["one, two and three", "one, two and three!"], ["one, two and three", "!", ""]),
        (["one, two, three: ", "one, two, three: 4\ufffd", ""], ["one, two, three: ", "4", "", "\ufffd"]),
    ],
)
def test_no_more_is_held_back_than_is_uncertain(texts: list[str], returned: list[str]) -> None:
    growth = Growth()
    assert [*map(growth.push, texts), growth.end()] == returned


@pytest.mark.parametrize("limit", [None, 5])
def test_an_answer_ends_with_its_only_call(limit: int | None) -> None:
    prompt = RenderedPrompt("Hi", 2, tools=("weather",), single=True)
    generation = Generation(request_id="r", model="m", prompt=prompt, deadline=0, max_tokens=limit)
    reader = TextAnswer(generation, MODEL, prompt, cut_stops=False, limit=limit)
    events = reader.take(News(text=CALL[:40]))
    assert not reader.over
    events += reader.take(News(text=CALL[40:] + CALL, finish="length"))
    assert reader.over
    found = deltas([*events, *reader.end()])
    assert joined_pieces(piece for delta in found for piece in delta.pieces) == (BERLIN,)
    assert found[-1].finish_reason == "tool_calls"
    assert found[-1].usage is not None
    assert found[-1].usage.completion_tokens == 2 * len(CALL)  # those that were generated


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "before", "stop"),
    [
        ("xabcd y", ["abcd", "bc"], "xa", "bc"),
        ("xabcd y", ["bc", "abc"], "x", "abc"),
        ("xabcd y", ["bcd", "abcde", "d"], "xa", "bcd"),
        ("aaab", ["aab", "ab", "c"], "a", "aab"),
        ("ababc", ["abc"], "ab", "abc"),
    ],
)
def test_the_stop_string_that_is_complete_first_ends_an_answer_however_it_came(
    text: str, stops: list[str], before: str, stop: str, *, include: bool
) -> None:
    """As in the engine of our own: `StopStrings` in `triton_models`."""
    for split in range(2 ** (len(text) - 1)):
        cuts = [at for at in range(1, len(text)) if split >> (at - 1) & 1]
        found = read(text, cuts, stop=stops, include_stop=include)
        assert "".join(delta.text for delta in found) == before + (stop if include else "")
        assert found[-1].stop_reason == stop


def test_text_is_compared_with_a_stop_string_once_however_long_it_is_held_back() -> None:
    compared = 0

    class Stop(str):
        __slots__ = ()

        def startswith(self, *args: Any) -> bool:
            nonlocal compared
            compared += 1
            return super().startswith(*args)

    text = "a" * 400 + "b" * 400
    found = read(text, range(len(text)), stop=[Stop(text + "!"), Stop("a" * 1000), Stop("b" * 1000)])
    assert "".join(delta.text for delta in found) == text
    assert compared < 5 * len(text)


def test_an_answer_ends_with_its_stop_string_though_the_backend_goes_on() -> None:
    reader = answer(stop=["END"])
    reader.take(News(text="one EN"))
    assert not reader.over
    reader.take(News(text="D and so on"))
    assert reader.over
    assert reader.take(News(text="more")) == []
    ends = [(delta.finish_reason, delta.stop_reason) for delta in deltas(reader.end())]
    assert ends == [("stop", "END")]


def test_a_prompt_is_repeated_once_and_is_no_part_of_the_answer() -> None:
    reader = answer(echo=True, stop=["Hi"])
    accepted, *events = [*reader.accept(), *reader.take(News(text="Two.", finish="stop")), *reader.end()]
    assert isinstance(accepted, Accepted)
    assert [(delta.text, delta.tokens) for delta in deltas(events)] == [("Hi", 0), ("Two.", 0), ("", 4)]
    assert events[-1].finish_reason == "stop"


@pytest.mark.parametrize("counts", [None, 4])
@pytest.mark.parametrize(("stream", "told"), [(True, 4), (False, 0)])
def test_when_tokens_came_is_told_of_a_stream_alone(counts: int | None, told: int, *, stream: bool) -> None:
    """What comes whole has its tokens with its end: nobody knows when the first one was there."""
    reader = answer(stream=stream)
    first, last = deltas([*reader.take(News(text="Two.", tokens=counts, finish="stop")), *reader.end()])
    assert (first.text, first.finish_reason, first.tokens) == ("Two.", None, min(told, counts or 1))
    assert (last.text, last.finish_reason, last.tokens) == ("", "stop", 4 - first.tokens)
