"""Log-probabilities: of whatever the model's side makes of its tokens, text has its own, and no others."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.events import Delta, Event
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.triton.dialects.test_chatglm import ACCEPTED, response
from tests.gateway.triton.dialects.test_chatglm_tools import asked
from tests.glm4_checkpoint import write_tokenizer
from tests.triton_models.text.conftest import GOLDEN
from triton_models.engine.sequence import FinishReason, TokenLogprobs, TokenOutput
from triton_models.serving.chat_text import ChatText
from triton_models.serving.request import Choice
from triton_models.text.formats import chat_format
from triton_models.text.tokenizers import load_tokenizer
from wire import meta as wire_meta
from wire.calls import NOTATIONS
from wire.request import Generation

FORMATS = ("chatglm3", "glm4")
ROLE = "<|assistant|>"
JSON_BESIDE = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatText]:
    glm4 = tmp_path_factory.mktemp("glm4")
    write_tokenizer(glm4)
    directories = {"chatglm3": GOLDEN / "chatglm3", "glm4": glm4}
    tokenizers = {name: load_tokenizer(directories[name], name) for name in FORMATS}
    return {name: ChatText.of(each, chat_format(name, each)) for name, each in tokenizers.items()}


def call(name: str, **arguments: Any) -> str:
    space = " " if name == "chatglm3" else ""
    return f"get_weather\n{space}" + NOTATIONS[name].write(arguments)


def ids_of(text: ChatText, segments: Sequence[str]) -> list[int]:
    """Return what a model samples for an answer of `segments`; characters outside the text are bytes."""
    ids: list[int] = []
    for number, segment in enumerate(segments):
        if number:
            ids.append(text.tokenizer.special_ids[ROLE])
        ids += text.tokenizer.encode(segment)
    return ids


def read(
    text: ChatText, ids: list[int], ends: Sequence[int] = (), stop: Sequence[str] = (), **parameters: Any
) -> list[Event]:
    """Let the model's side make responses of `ids`, one up to each of `ends`; return the gateway's events."""
    wire = Generation(request_id="r", logprobs=0, stop=list(stop))
    choice = Choice("r.0", 0, wire, text.tokenizer, text.answer(wire))
    report = ModelReport(heartbeat_age_s=0, chat_format=text.format.name, max_context=512)
    decoder = CHATGLM.decoder(asked(logprobs=True, **parameters), report)
    events = decoder.decode(response(meta=ACCEPTED))[1:]
    sampled = [*ids, text.tokenizer.special_ids["<|user|>"]]
    bounds = [0, *sorted(min(end, len(ids)) for end in ends), len(sampled)]
    for begin, end in pairwise(bounds):
        for place in range(begin, end):
            reason = FinishReason.STOP if place == len(ids) else None
            logprobs = TokenLogprobs(id=sampled[place], logprob=-float(place), top=())
            choice.take(
                TokenOutput(
                    request_id="r",
                    prompt_tokens=7,
                    token_id=sampled[place],
                    logprobs=logprobs,
                    finish_reason=reason,
                )
            )
        ended = choice.complete
        usage = wire_meta.Usage(prompt_tokens=7, completion_tokens=choice.completion_tokens)
        told, meta = choice.last_response(usage if ended else None)
        events += decoder.decode(response(told, wire_meta.encode_meta(meta)))
        if ended:
            break
    decoder.end()
    return events


def shown(events: list[Event]) -> list[tuple[Any, ...]]:
    """Return texts with their tokens, and names of calls, in order: the tokens' bytes are the text."""
    told: list[tuple[Any, ...]] = []
    deltas = [event for event in events if isinstance(event, Delta)]
    added = b"".join(each.utf8 for delta in deltas for each in delta.logprobs or ())
    bytes_as_characters = added.decode(errors="surrogateescape")
    as_text = "".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in bytes_as_characters)
    assert as_text == "".join(delta.text for delta in deltas)
    for event in events:
        if not isinstance(event, Delta):
            continue
        if event.text or event.logprobs:
            assert event.logprobs is not None
            places = [round(-each.logprob) for each in event.logprobs]
            if told and told[-1][0] == "text":
                told[-1] = ("text", told[-1][1] + event.text, told[-1][2] + places)
            else:
                told.append(("text", event.text, places))
        told += [("call", part.name) for part in event.calls if part.name]
    return told


def spoken(text: ChatText, ids: list[int], begin: int, end: int, also: str = "") -> list[int]:
    """Return the places of tokens but for white space at the beginning; of that, those that are `also`."""
    texts = {place: text.tokenizer.display(ids[place])[1] for place in range(begin, end)}
    first = next(place for place, utf8 in texts.items() if utf8.strip())
    return [place for place, utf8 in texts.items() if place >= first or utf8 == also.encode() != b""]


@pytest.mark.parametrize("name", FORMATS)
def test_texts_around_calls_have_their_tokens_and_calls_have_none(
    name: str, texts: dict[str, ChatText]
) -> None:
    text = texts[name]
    segments = ["\n Well, 🙂 你好", call(name, city="襄阳"), "\n Done.", call(name), call(name, days=[1])]
    before = [len(ids_of(text, segments[:number])) for number in range(1, 4)]
    ids = ids_of(text, segments)
    expected = [
        ("text", "Well, 🙂 你好", spoken(text, ids, 0, before[0])),
        ("call", "get_weather"),
        ("text", "\nDone.", spoken(text, ids, before[1], before[2], also="\n")),
        ("call", "get_weather"),
        ("call", "get_weather"),
    ]
    assert shown(read(text, ids)) == expected
    assert shown(read(text, ids, range(len(ids)))) == expected


def test_text_behind_json_has_its_tokens(texts: dict[str, ChatText]) -> None:
    text = texts["glm4"]
    begun = ids_of(text, ["get_weather\n{}"])
    for behind in ("Then", "\n 🙂"):
        ids = [*begun, *text.tokenizer.encode(behind)]
        places = spoken(text, ids, len(begun), len(ids))
        expected = [("call", "get_weather"), ("text", behind.strip(), places)]
        assert shown(read(text, ids)) == shown(read(text, ids, range(len(ids)))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_of_a_stop_string_are_not_the_texts(name: str, texts: dict[str, ChatText]) -> None:
    text = texts[name]
    ids = ids_of(text, ["\n Hello there"])
    before = len(ids_of(text, ["\n Hello"]))
    expected = [("text", "Hello", spoken(text, ids, 0, before))]
    assert shown(read(text, ids, stop=["there"])) == expected
    assert shown(read(text, ids, range(len(ids)), stop=["there"])) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_that_a_stop_string_cuts_has_the_bytes_before_it(
    name: str, texts: dict[str, ChatText]
) -> None:
    text = texts[name]
    ids = ids_of(text, ["\n Hello there"])
    whole = next(place for place in range(len(ids)) if len(text.tokenizer.display(ids[place])[1].strip()) > 1)
    piece = text.tokenizer.display(ids[whole])[0].strip()
    for ends in ((), range(len(ids))):
        events = read(text, ids, ends, stop=[piece[1:]])
        assert shown(events)[0][2][-1] == whole
        listed = [each for event in events if isinstance(event, Delta) for each in event.logprobs or ()]
        assert (listed[-1].token.strip(), listed[-1].utf8[-1:]) == (piece, piece[:1].encode())


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_short_and_left_out_has_no_tokens(name: str, texts: dict[str, ChatText]) -> None:
    text = texts[name]
    begun = ids_of(text, ["\n{}"])
    for cut in ("get_wea", "get_weather", "get_weather\n ", call(name, city="襄阳")[:-5]):
        ids = ids_of(text, ["\n{}", cut])
        for ends in ((), range(len(ids))):
            told = shown(read(text, ids, ends, **JSON_BESIDE))
            assert [each for each in told if each[0] == "text"] == [
                ("text", "{}", spoken(text, begun, 0, len(begun)))
            ]


PIECES = st.sampled_from(
    ["你好", "🙂", "a", " ", "  ", "\n", "\ufffd", "get_weather", "get_weather\n", "now\n{}", "}", '{"a": "']
)
SEGMENTS = st.lists(
    st.sampled_from(["CALL"]) | st.lists(PIECES, max_size=4).map("".join), min_size=1, max_size=4
)


@given(
    name=st.sampled_from(FORMATS),
    segments=SEGMENTS,
    ends=st.lists(st.integers(0, 60), max_size=6),
    noise=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=2),
    stop=st.sampled_from([[], ["a"], ["\n"], ["好🙂"]]),
    parameters=st.sampled_from([{}, {"tool_choice": "required"}, JSON_BESIDE]),
)
def test_cuts_change_nothing(
    *,
    name: str,
    segments: list[str],
    ends: list[int],
    noise: list[tuple[int, int]],
    stop: list[str],
    parameters: dict[str, Any],
    texts: dict[str, ChatText],
) -> None:
    """Broken characters and tokens that are not text stand anywhere."""
    text = texts[name]
    ids = ids_of(text, [call(name, city="京") if each == "CALL" else each for each in segments])
    odd = [text.tokenizer.encode("🙂")[-1], text.tokenizer.encode("京")[-2], text.tokenizer.size + 5]
    odd += [text.tokenizer.special_ids[ROLE], text.tokenizer.encode(" a")[0]]
    for place, which in noise:
        ids.insert(min(place, len(ids)), odd[which])
    whole = shown(read(text, ids, stop=stop, **parameters))
    assert shown(read(text, ids, ends, stop, **parameters)) == whole
    reported = [place for each in whole if each[0] == "text" for place in each[2]]
    assert reported == sorted(set(reported))
