import asyncio
import json
import struct
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tritonclient.grpc import service_pb2

from gateway.core.events import Accepted, Delta, Event, Reasoning, joined_pieces
from gateway.core.request import Conversation, Generation, Message, PlainText, TokenIds
from gateway.core.upstream import Tokenization
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects.base import Dialect, ModelReport
from gateway.triton.dialects.model_text import ModelText
from gateway.triton.dialects.tensors import outputs
from gateway.triton.dialects.trtllm_ids import CONTRACT

INPUTS = frozenset(
    {
        "input_ids", "input_lengths", "request_output_len", "streaming", "end_id", "pad_id", "beam_width",
        "temperature", "runtime_top_k", "runtime_top_p", "seed", "stop_words_list", "bad_words_list",
        "exclude_input_in_output", "return_log_probs",
    }
)  # fmt: skip
END, OTHER_END, THINK, THOUGHT = range(256, 260)
EURO = list("€".encode())
TALK = Conversation((Message(role="user", content="a"),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """Its tokens are bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(
        models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = ("</s>", "<|user|>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, OTHER_END]}))
    template = "{% for each in messages %}<|user|>{{ each.content }}{% endfor %}{# </think> #}"
    (folder / "chat_template.jinja").write_text(template)
    return ModelText.read(folder)


@pytest.fixture
def dialect(model: ModelText) -> Dialect:
    return CONTRACT.dialect(INPUTS, model)


def generation(**changes: Any) -> Generation:
    fields: dict[str, Any] = {"request_id": "r", "model": "m", "prompt": PlainText("ab"), "deadline": 0.0}
    return Generation(**(fields | changes))


def prepared(dialect: Dialect, **changes: Any) -> Generation:
    async def prepare() -> Generation:
        assert dialect.prepare is not None
        return await dialect.prepare(generation(**changes), ModelReport())

    return asyncio.run(prepare())


def written(dialect: Dialect, **changes: Any) -> dict[str, list[Any]]:
    message = dialect.request(prepared(dialect, **changes), ModelReport(), 1.0)
    response = service_pb2.ModelInferResponse(raw_output_contents=message.raw_input_contents)
    for tensor in message.inputs:
        assert tensor.shape[0] == 1
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return outputs(response)


def answered(
    dialect: Dialect, *each: list[int], logprobs_of: Sequence[list[float]] = (), **changes: Any
) -> list[Event]:
    decoder = dialect.decoder(prepared(dialect, **changes), ModelReport())
    events: list[Event] = []
    for ids, probabilities in zip_longest(each, logprobs_of):
        response = service_pb2.ModelInferResponse()
        for name, values in (("output_ids", ids), ("sequence_length", [len(ids)])):
            response.outputs.add(name=name, datatype="INT32")
            response.raw_output_contents.append(struct.pack(f"<{len(values)}i", *values))
        if probabilities is not None:
            response.outputs.add(name="output_log_probs", datatype="FP32")
            response.raw_output_contents.append(struct.pack(f"<{len(probabilities)}f", *probabilities))
        events += decoder.decode(response)
    return [*events, *decoder.end()]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def last_of(events: list[Event]) -> Delta:
    last = events[-1]
    assert isinstance(last, Delta)
    return last


def test_a_request_has_the_contracts_tensors(dialect: Dialect) -> None:
    told = written(dialect, max_tokens=7, temperature=0.5, seed=-1, stream=True)
    assert told == {
        "input_ids": [97, 98],
        "input_lengths": [2],
        "request_output_len": [7],
        "beam_width": [1],
        "streaming": [True],
        "exclude_input_in_output": [True],
        "end_id": [END],
        "pad_id": [END],
        "temperature": [0.5],
        "runtime_top_p": [1.0],
        "seed": [2**64 - 1],
        "stop_words_list": [OTHER_END, 1],
    }


def test_words_that_end_an_answer_or_are_not_in_it(dialect: Dialect) -> None:
    told = written(dialect, stop=["xyz"], stop_token_ids=[7], ignore_eos=True, bad_words=["no"])
    assert told["end_id"] == [-1]
    assert told["stop_words_list"] == [7, *b"xyz", 1, 4, -1, -1]
    assert told["bad_words_list"] == [*b"no no", 2, 5, -1, -1, -1]


def test_a_conversation_is_rendered_and_ids_are_taken_as_they_are(dialect: Dialect) -> None:
    conversation = Conversation((Message(role="user", content="a"),))
    assert written(dialect, prompt=conversation)["input_ids"] == [OTHER_END, 97]
    assert written(dialect, prompt=TokenIds((1, 2)))["input_ids"] == [1, 2]
    assert dialect.tokens is not None
    asked = Tokenization(request_id="r", model="m", prompt=conversation, deadline=0.0, strings=True)
    assert dialect.tokens(asked).ids == [OTHER_END, 97]


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", TokenIds((2**40,))), ("max_tokens", 2**40), ("stop_token_ids", [7, 2**31])],
)
def test_what_no_tensor_can_hold_is_refused_by_name(dialect: Dialect, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        written(dialect, **{field: value})
    assert caught.value.param == field


def test_characters_come_whole(dialect: Dialect) -> None:
    events = answered(dialect, EURO[:1], EURO[1:2], [*EURO[2:], 33], [], stream=True, max_tokens=9)
    pieces = [event.text for event in events if isinstance(event, Delta) and event.text]
    assert pieces == ["€!"]
    last = last_of(events)
    assert last.finish_reason == "stop"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 4)


@pytest.mark.parametrize(("prompt", "text"), [(PlainText("a"), "a b"), (TokenIds([1]), "a b"), (TALK, "b")])
def test_a_completion_begins_with_its_space(tmp_path: Path, prompt: Any, text: str) -> None:
    """Tokenizers like Llama's drop one at the beginning of a text: such is the answer in a conversation."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "\u2581a": 1, "\u2581b": 2}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Prepend("\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    dialect = CONTRACT.dialect(INPUTS, ModelText.read(tmp_path))
    assert text_of(answered(dialect, [2], prompt=prompt, echo=prompt is not TALK)) == text


def test_a_character_cut_by_the_limit_is_not_lost(dialect: Dialect) -> None:
    events = answered(dialect, [33, *EURO[:2]], max_tokens=3)
    assert text_of(events) == "!\ufffd\ufffd"  # one for each byte, as the tokenizer writes it
    assert last_of(events).finish_reason == "length"


def test_a_stop_string_is_cut_however_it_was_tokenized(dialect: Dialect) -> None:
    events = answered(dialect, [*b"one E"], [*b"ND"], stream=True, stop=["END"])
    assert text_of(events) == "one "
    assert (last_of(events).finish_reason, last_of(events).stop_reason) == ("stop", "END")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_id_ends_an_answer_and_counts(dialect: Dialect, text: str, *, include: bool) -> None:
    events = answered(dialect, [*b"abc"], stop_token_ids=[98], include_stop=include, return_token_ids=True)
    assert text_of(events) == text
    assert [event.token_ids for event in events if isinstance(event, Delta) and event.token_ids] == [(97, 98)]
    assert (last_of(events).finish_reason, last_of(events).stop_reason) == ("stop", 98)
    accepted = events[0]
    assert isinstance(accepted, Accepted)
    assert accepted.prompt_token_ids == ((97, 98),)


def test_a_prompt_is_repeated_beside_its_ids(dialect: Dialect) -> None:
    accepted, *events = answered(dialect, [*b"c"], echo=True, return_token_ids=True)
    assert accepted == Accepted(prompt_tokens=2, prompt_token_ids=((97, 98),))
    assert text_of(events) == "abc"


def test_an_end_id_in_the_answer_is_not_shown(dialect: Dialect) -> None:
    events = answered(dialect, [97, OTHER_END, 98])
    assert text_of(events) == "a"
    assert (last_of(events).finish_reason, last_of(events).stop_reason) == ("stop", None)


@pytest.mark.parametrize(("show", "text"), [(False, "ab"), (True, "a<think>b")])
def test_special_tokens_are_shown_if_asked_for(dialect: Dialect, text: str, *, show: bool) -> None:
    assert text_of(answered(dialect, [97, THINK, 98], show_special=show)) == text


def test_reasoning_comes_apart_though_its_marks_are_special_tokens(dialect: Dialect) -> None:
    prompt = Conversation((Message(role="user", content="a"),))
    events = answered(dialect, [THINK, *b"Hm."], [THOUGHT, *b"Two."], prompt=prompt, stream=True)
    pieces = joined_pieces(piece for event in events if isinstance(event, Delta) for piece in event.pieces)
    assert list(pieces) == [Reasoning("Hm."), "Two."]
    usage = last_of(events).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens) == (2, 9, 3)


def test_a_release_without_the_input_repeats_the_prompt(model: ModelText) -> None:
    older = CONTRACT.dialect(INPUTS - {"exclude_input_in_output"}, model)
    assert text_of(answered(older, [97, 98, 99])) == "c"
    assert text_of(answered(older, [97, 98], stream=True)) == "ab"


def test_a_limit_of_the_gateways_own_ends_an_answer_as_any_other(dialect: Dialect) -> None:
    assert last_of(answered(dialect, [97] * 1024)).finish_reason == "length"


@pytest.mark.parametrize(
    "told",
    [
        [[-0.5], [-1.0, -1.5, -2.0], [-2.5]],
        [[-0.5], [-0.5, -1.0, -1.5, -2.0], [-0.5, -1.0, -1.5, -2.0, -2.5]],
        [[-0.5], [-0.5, -1.0, -1.5, -2.0], [-0.5, -1.0, -1.5, -2.0, -2.5, -3.0]],  # and the end's own
    ],
)
def test_log_probabilities_are_those_of_the_answers_ids(dialect: Dialect, told: list[list[float]]) -> None:
    events = answered(dialect, [97], EURO, [98], logprobs_of=told, logprobs=0, stream=True)
    tokens = [each for event in events if isinstance(event, Delta) for each in event.logprobs or ()]
    assert [(each.id, each.token, each.logprob, each.top) for each in tokens] == [
        (97, "a", -0.5, ()),
        (EURO[0], "", -1.0, ()),
        (EURO[1], "", -1.5, ()),
        (EURO[2], "€", -2.0, ()),
        (98, "b", -2.5, ()),
    ]
    assert written(dialect, logprobs=0)["return_log_probs"] == [True]
    assert "return_log_probs" not in written(dialect)


def test_the_id_that_stopped_an_answer_has_no_log_probability(dialect: Dialect) -> None:
    asked: dict[str, Any] = {"logprobs": 0, "stop_token_ids": [98]}
    events = answered(dialect, [*b"abc"], logprobs_of=[[-0.5, -1.0, -1.5]], **asked)
    tokens = [each for event in events if isinstance(event, Delta) for each in event.logprobs or ()]
    assert [each.token for each in tokens] == ["a"]


def test_log_probabilities_that_are_left_out_are_an_error(dialect: Dialect) -> None:
    with pytest.raises(UpstreamProtocolError, match="left out"):
        answered(dialect, [*b"abc"], logprobs_of=[[-0.5, -1.0]], logprobs=0)


def test_only_the_last_tokens_of_a_prompt_are_kept(dialect: Dialect) -> None:
    kept: dict[str, Any] = {"prompt": PlainText("abcd"), "truncate_prompt_tokens": 3, "echo": True}
    assert written(dialect, **kept)["input_ids"] == [*b"bcd"]
    events = answered(dialect, [*b"ef"], **kept)
    assert events[0] == Accepted(prompt_tokens=3)
    assert text_of(events) == "bcdef"
    assert written(dialect, **kept | {"truncate_prompt_tokens": 5})["input_ids"] == [*b"abcd"]
    assert text_of(answered(dialect, [99], prompt=TokenIds((97, 98)), echo=True)) == "abc"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logprobs": 1}, "top_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(dialect: Dialect, changes: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        written(dialect, **changes)
    assert caught.value.param == param


def test_an_older_release_has_no_log_probabilities(model: ModelText) -> None:
    older = CONTRACT.dialect(INPUTS - {"return_log_probs"}, model)
    with pytest.raises(InvalidRequestError) as caught:
        written(older, logprobs=0)
    assert caught.value.param == "logprobs"


def test_the_ids_of_the_end_are_those_of_the_folder(model: ModelText) -> None:
    assert model.vocabulary is not None
    assert (model.vocabulary.ends, model.vocabulary.pad) == ((END, OTHER_END), END)
