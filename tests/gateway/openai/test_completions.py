import json
from typing import Any

import pytest

from gateway.core.events import PromptLogprob, TokenLogprob, TopLogprob
from gateway.core.request import PlainText, TokenIds
from gateway.errors import InvalidRequestError
from gateway.openai.completions import CompletionRequest, LogprobsWriter


def read(**parameters: Any) -> CompletionRequest:
    return CompletionRequest.read(json.dumps({"model": "m", "prompt": "hi", **parameters}).encode())


def test_the_minimum_asks_for_the_defaults() -> None:
    generation = read().generations(request_id="r", deadline=1.5)[0]
    assert (generation.request_id, generation.model, generation.deadline) == ("r", "m", 1.5)
    assert generation.prompt == PlainText("hi")
    assert (generation.temperature, generation.top_p, generation.max_tokens) == (1.0, 1.0, None)
    assert generation.logprobs is None
    assert not generation.stream
    assert not generation.return_token_ids


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("", PlainText("")), (" a\n", PlainText(" a\n")), ([0, 2**32 - 1], TokenIds((0, 2**32 - 1)))],
)
def test_a_prompt_is_text_or_ids(prompt: Any, expected: PlainText | TokenIds) -> None:
    assert read(prompt=prompt).generations(request_id="r", deadline=0)[0].prompt == expected


def test_every_parameter_arrives() -> None:
    asked = read(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=-1,
        stop="x",
        logit_bias={"5": -100},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        top_k=3,
        min_p=0.5,
        repetition_penalty=2,
        presence_penalty=1,
        frequency_penalty=-1,
        min_tokens=7,
        ignore_eos=True,
        stop_token_ids=[2],
        return_token_ids=True,
        user="u",
        metadata={"a": "b"},
    )
    generation = asked.generations(request_id="r", deadline=0)[0]
    assert (generation.max_tokens, generation.min_tokens, generation.top_k) == (7, 7, 3)
    assert (generation.temperature, generation.top_p, generation.seed) == (0.0, 0.5, -1)
    assert (generation.stop, generation.stop_token_ids) == (["x"], [2])
    assert (generation.min_p, generation.repetition_penalty) == (0.5, 2.0)
    assert (generation.presence_penalty, generation.frequency_penalty) == (1.0, -1.0)
    assert generation.logit_bias == {5: -100.0}
    assert generation.ignore_eos
    assert generation.stream
    assert generation.return_token_ids
    assert asked.stream_options is not None
    assert asked.stream_options.include_usage


def test_choices_are_one_unless_asked_for() -> None:
    assert read().generations(request_id="r", deadline=0)[0].n == 1
    assert read(n=None, best_of=1).generations(request_id="r", deadline=0)[0].n == 1
    assert read(n=128, best_of=128).generations(request_id="r", deadline=0)[0].n == 128


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [[1], []]}, "prompt.1"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [[1], [2, -1]]}, "prompt.1.1"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [1, True]}, "prompt.1"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [2**32]}, "prompt.0"),
        ({"messages": [{}]}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"stop": list("abcdefghijklmnopq")}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"store": True}, "store"),
        ({"priority": 101}, "priority"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, -1]}, "allowed_token_ids.1"),
        ({"allowed_token_ids": [5] * 65_537}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": ["a" * 257]}, "bad_words.0"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": [2], "best_of": 2}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**parameters)
    assert refused.value.param == param


@pytest.mark.parametrize("name", CompletionRequest.unsupported)
def test_neutral_values_are_accepted(name: str) -> None:
    assert read(**{name: CompletionRequest.unsupported[name]}) == read() == read(**{name: None})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a"], [PlainText("a")]),
        (["a", ""], [PlainText("a"), PlainText("")]),
        ([[1], [2, 3]], [TokenIds((1,)), TokenIds((2, 3))]),
    ],
)
def test_several_prompts_are_asked_for_one_by_one(prompt: Any, expected: list[PlainText | TokenIds]) -> None:
    asked = read(prompt=prompt, n=2, echo=True)
    generations = asked.generations(request_id="r", deadline=1)
    assert [each.prompt for each in generations] == expected
    assert {(each.request_id, each.n, each.echo) for each in generations} == {("r", 2, True)}
    assert asked.choices == 2 * len(expected)
    if len(expected) > 1:
        assert [each.prompt_field for each in generations] == ["prompt.0", "prompt.1"]


def test_prompts_times_n_are_bounded() -> None:
    read(prompt=["a", "b"], n=2).check_choices(4, "it")
    for asked, param in (
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": ["a", "b"], "n": 3}, "prompt"),
        ({"n": 5}, "n"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            read(**asked).check_choices(4, "it")
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, (0, 0, 0)),
        ({"echo": True, "logprobs": 5, "max_tokens": 1}, (5, 5, 1)),
        ({"echo": False, "logprobs": 5}, (5, None, None)),
        ({"echo": True}, (None, None, None)),
        ({"prompt_logprobs": 0}, (None, 0, None)),
        ({"prompt_logprobs": 20, "logprobs": 5}, (5, 20, None)),
        ({"prompt_logprobs": 1, "logprobs": 5}, (5, 1, None)),
        ({"prompt_logprobs": 1, "logprobs": 5, "echo": True}, (5, 5, None)),
        ({"prompt_logprobs": 7, "logprobs": 5, "echo": True}, (5, 7, None)),
        ({"prompt_logprobs": 7, "echo": True}, (None, 7, None)),
    ],
)
def test_what_is_told_of_a_prompt_is_asked_for(asked: dict[str, Any], expected: tuple[Any, ...]) -> None:
    generation = read(**asked).generations(request_id="r", deadline=0)[0]
    assert (generation.logprobs, generation.prompt_logprobs, generation.max_tokens) == expected
    assert generation.prompt_ranks == ("prompt_logprobs" in asked)


def test_extensions_arrive() -> None:
    asked = read(
        logprobs=0, include_stop_str_in_output=True, skip_special_tokens=False, priority=-100, store=False
    )
    generation = asked.generations(request_id="r", deadline=0)[0]
    assert (generation.logprobs, generation.priority) == (0, -100)
    assert generation.include_stop
    assert generation.show_special
    plain = read(skip_special_tokens=True, echo=False).generations(request_id="r", deadline=0)[0]
    assert not any((plain.include_stop, plain.show_special, plain.echo))


def token(shown: str, utf8: bytes, *likely: str) -> TokenLogprob:
    top = tuple(
        TopLogprob(id=at, token=each, utf8=each.encode(), logprob=-1.0 if each == shown else -0.5)
        for at, each in enumerate(likely)
    )
    return TokenLogprob(id=7, token=shown, utf8=utf8, logprob=-1.0, top=top)


TOKENS = [
    token(" a", b" a", " a", "b"),
    token("\\xf0\\x9f", b"\xf0\x9f"),
    token("\\x99", b"\x99"),
    token("\\x82", b"\x82"),
    token("你好", "你好".encode(), "c"),
    token("<|user|>", b""),
    token("x", b"x"),
]
OFFSETS = [0, 2, 2, 2, 3, 5, 5]


@pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
def test_offsets_are_of_characters_however_the_tokens_are_cut(cut: int) -> None:
    writer = LogprobsWriter(5)
    parts = [writer.write(TOKENS[:cut]), writer.write(TOKENS[cut:])]
    assert [place for part in parts for place in part.text_offset] == OFFSETS
    for part in parts:
        lengths = {
            len(part.tokens),
            len(part.token_logprobs),
            len(part.top_logprobs),
            len(part.text_offset),
        }
        assert len(lengths) == 1


def test_the_sampled_token_is_among_the_likely_ones() -> None:
    written = LogprobsWriter(5).write(TOKENS)
    assert written.top_logprobs[0] == {" a": -1.0, "b": -0.5}
    assert written.top_logprobs[4] == {"c": -0.5, "你好": -1.0}
    assert written.top_logprobs[6] == {"x": -1.0}


def test_the_prompts_tokens_come_first_and_the_first_has_no_logprob() -> None:
    prompt = [
        PromptLogprob(id=1, token="sop", utf8=b"", logprob=None, top=()),
        PromptLogprob(id=2, token="你", utf8="你".encode(), logprob=-2.0, top=()),
    ]
    written = LogprobsWriter(5).write([*prompt, *TOKENS[4:5]])
    assert written.tokens == ["sop", "你", "你好"]
    assert written.token_logprobs == [None, -2.0, -1.0]
    assert written.top_logprobs == [None, {"你": -2.0}, {"c": -0.5, "你好": -1.0}]
    assert written.text_offset == [0, 0, 1]


def test_bytes_that_begin_no_character_are_one_in_the_text() -> None:
    lone = [
        token("&", b"&"),
        token("\\x99", b"\x99"),
        token("a", b"a"),
        token("\\xe4", b"\xe4"),
        token("b", b"b"),
    ]
    assert LogprobsWriter(5).write(lone).text_offset == [0, 1, 2, 3, 4]
    split = [
        token("\\x99", b"\x99"),
        *(token("?", byte) for byte in (b"\xe4", b"\xbd", b"\xa0")),
        token("c", b"c"),
    ]
    assert LogprobsWriter(5).write(split).text_offset == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(("special", "offsets"), [(False, [0, 1, 1, 2]), (True, [0, 1, 9, 10])])
def test_special_tokens_have_a_place_where_they_are_shown(special: bool, offsets: list[int]) -> None:
    named = [token("a", b"a"), token("<|user|>", b""), token("b", b"b"), token("c", b"c")]
    assert LogprobsWriter(5, special=special).write(named).text_offset == offsets
    prompt = PromptLogprob(id=1, token="[gMASK]", utf8=b"", logprob=None, top=())
    after = LogprobsWriter(5, special=special).write([prompt, *named]).text_offset
    assert after == [0, *offsets], "a text's prefix is not echoed"


def test_tokens_that_are_shown_alike_do_not_take_each_others_values() -> None:
    alike = TokenLogprob(
        id=90,
        token="W",
        utf8=b"W",
        logprob=-6.75,
        top=(
            TopLogprob(id=1093, token="W", utf8=b"W", logprob=-3.25),
            TopLogprob(id=7, token="W", utf8=b"W", logprob=-9.0),
        ),
    )
    assert LogprobsWriter(2).write([alike]).top_logprobs == [{"W": -6.75}]


def test_no_more_alternatives_are_written_than_were_asked_for() -> None:
    assert LogprobsWriter(1).write(TOKENS[:1]).top_logprobs == [{" a": -1.0}]
    assert LogprobsWriter(0).write(TOKENS[4:5]).top_logprobs == [{"你好": -1.0}]
