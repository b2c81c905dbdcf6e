"""What models of older and newer releases of one backend take and tell."""

import asyncio
import json
import re
import struct
from collections.abc import Collection
from typing import Any

import pytest

from gateway.chat.templates import ChatTemplate
from gateway.core.events import Delta, TokenLogprob
from gateway.core.request import (
    Conversation,
    Generation,
    Grammar,
    Image,
    Message,
    PlainText,
    Prompt,
    Tool,
    ToolOffer,
)
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects import Dialects, llm_api, trtllm, vllm
from gateway.triton.dialects.base import Dialect, ModelReport, Request, Response
from gateway.triton.dialects.foreign import Contract
from gateway.triton.dialects.model_text import ModelText
from gateway.triton.dialects.tensors import outputs
from tests.gateway.triton.dialects.test_text_answer import by_character
from tests.gateway.triton.fake_triton import having
from wire.strings import pack_strings

PROMPT = "Tell me, what is one and one?"
COUNTING = ModelText()
NOT_COUNTING = ModelText(vocabulary=by_character())
VLLM = frozenset({"text_input", "sampling_parameters", "stream"})
ENSEMBLE = frozenset({"text_input", "max_tokens", "stream", "exclude_input_in_output"})
COUNTS = frozenset({"return_num_input_tokens", "return_num_output_tokens"})
LLM_API = frozenset({"text_input", "sampling_param_max_tokens", "streaming", "return_finish_reason"})


def prepared(dialect: Dialect, prompt: Prompt | None = None, **changes: Any) -> Generation:
    prompt = prompt or PlainText(PROMPT)
    generation = Generation(request_id="r", model="m", prompt=prompt, deadline=0, **changes)

    async def prepare() -> Generation:
        assert dialect.prepare is not None
        return await dialect.prepare(generation, ModelReport())

    return asyncio.run(prepare())


def response(text: str, finish: str | None = None, **counts: int) -> Response:
    made = Response()
    texts = {"text_output": text} | ({} if finish is None else {"finish_reason": finish})
    for name, value in texts.items():
        made.outputs.add(name=name, datatype="BYTES", shape=[1])
        made.raw_output_contents.append(pack_strings([value.encode()]))
    for name, count in counts.items():
        made.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        made.raw_output_contents.append(struct.pack("<i", count))
    return made


def read(dialect: Dialect, responses: Collection[Response], **changes: Any) -> tuple[str, Delta]:
    """Return the text of an answer, and what came last."""
    generation = prepared(dialect, **changes)
    decoder = dialect.decoder(generation, ModelReport())
    events = [event for each in responses for event in decoder.decode(each)] + list(decoder.end())
    deltas = [event for event in events if isinstance(event, Delta)]
    usage = deltas[-1].usage
    assert usage is not None
    assert sum(delta.tokens for delta in deltas) == usage.completion_tokens
    return "".join(delta.text for delta in deltas), deltas[-1]


def logprobs_of(dialect: Dialect, answer: Response) -> list[TokenLogprob]:
    decoder = dialect.decoder(prepared(dialect, logprobs=2), ModelReport())
    events = [*decoder.decode(answer), *decoder.end()]
    return [each for event in events if isinstance(event, Delta) for each in event.logprobs or ()]


def given(request: Request) -> dict[str, list[Any]]:
    return outputs(
        Response(
            outputs=[{"name": each.name, "datatype": each.datatype} for each in request.inputs],
            raw_output_contents=request.raw_input_contents,
        )
    )


@pytest.mark.parametrize(
    ("stream", "texts"),
    [
        (False, [PROMPT + "It is two."]),
        (True, ["It is", " two."]),
        (True, [PROMPT + "It is", PROMPT + "It is two."]),
        (False, ["It is two."]),
    ],
)
def test_an_older_vllm_does_not_repeat_the_prompt(texts: list[str], *, stream: bool) -> None:
    dialect = vllm.CONTRACT.dialect(VLLM, NOT_COUNTING)
    found, last = read(dialect, [response(text) for text in texts], stream=stream)
    assert found == "It is two."
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), len("It is two."))
    assert last.finish_reason == "stop"


def test_any_vllm_reads_the_parameters_of_a_plain_request() -> None:
    """None may be null, older releases refuse 0 as `top_k`, and do not know of all parameters."""
    dialect = vllm.CONTRACT.dialect(VLLM, NOT_COUNTING)

    def sent(**changes: Any) -> Any:
        asked = given(dialect.request(prepared(dialect, **changes), ModelReport(), 1.0))
        return json.loads(asked["sampling_parameters"][0])

    plain = sent()
    assert (plain["max_tokens"], plain["top_k"]) == (2**31 - 1, -1)
    assert None not in plain.values()
    assert not plain.keys() & {"min_tokens", "bad_words", "logit_bias"}
    chosen = {"max_tokens": 5, "top_k": 4, "min_tokens": 2, "bad_words": ["x"]}
    assert sent(**chosen).items() >= chosen.items()


@pytest.mark.parametrize(
    ("newer", "name"), [(set(), "guided_decoding"), ({"embedding_request"}, "structured_outputs")]
)
def test_releases_of_vllm_call_a_grammar_differently(newer: set[str], name: str) -> None:
    """The backend of 25.11 renamed it, and began to embed; each release refuses the other name."""
    dialect = vllm.CONTRACT.dialect(VLLM | newer, NOT_COUNTING)
    grammar = Grammar(kind="regex", text="a", field="structured_outputs.regex")
    asked = given(dialect.request(prepared(dialect, grammar=grammar), ModelReport(), 1.0))
    parameters = json.loads(asked["sampling_parameters"][0])
    assert parameters.keys() & {"guided_decoding", "structured_outputs"} == {name}
    assert json.loads(parameters[name]) == {"regex": "a"}


def test_an_older_vllm_tells_neither_lengths_nor_reasons() -> None:
    dialect = vllm.CONTRACT.dialect(VLLM, NOT_COUNTING)
    assert dialect.counts_at_end
    long = response(PROMPT + "x" * 2_000)
    assert read(dialect, [long])[1].finish_reason == "stop"
    assert read(dialect, [long], max_tokens=2_000)[1].finish_reason == "length"


@pytest.mark.parametrize("logprob", ["-Infinity", "-1e300", "NaN"])
def test_a_log_probability_has_a_floor(logprob: str) -> None:
    """JSON has no infinity: clients would read null."""
    dialect = vllm.CONTRACT.dialect(VLLM | {"exclude_input_in_output", "return_logprobs"}, NOT_COUNTING)
    answer = response("a", finish="stop")
    entry = f'{{"logprob": {logprob}, "decoded_token": "b"}}'
    tokens = f'[{{"5": {{"logprob": -0.5, "decoded_token": "a"}}, "7": {entry}}}]'
    answer.outputs.add(name="logprobs", datatype="BYTES", shape=[1])
    answer.raw_output_contents.append(pack_strings([tokens.encode()]))
    [token] = logprobs_of(dialect, answer)
    assert [(each.token, each.logprob) for each in token.top] == [("a", -0.5), ("b", -9999.0)]


@pytest.mark.parametrize("told", ["[{", "[{}]", "3", "[3]", '[{"x": {"logprob": 0}}]', '[{"5": {}}]'])
def test_log_probabilities_that_cannot_be_read_are_the_backends_fault(told: str) -> None:
    dialect = vllm.CONTRACT.dialect(VLLM | {"exclude_input_in_output", "return_logprobs"}, NOT_COUNTING)
    answer = response("a", finish="stop")
    answer.outputs.add(name="logprobs", datatype="BYTES", shape=[1])
    answer.raw_output_contents.append(pack_strings([told.encode()]))
    with pytest.raises(UpstreamProtocolError, match="log-probabilities"):
        logprobs_of(dialect, answer)


@pytest.mark.parametrize("inputs", [VLLM, ENSEMBLE])
def test_who_counts_no_tokens_needs_a_tokenizer(inputs: frozenset[str]) -> None:
    with pytest.raises(UpstreamProtocolError, match="counts no tokens"):
        Dialects().of("m", having(inputs))
    assert not Dialects().of("m", having(inputs | COUNTS)).counts_at_end


@pytest.mark.parametrize(
    "responses",
    [
        [response("one two", num_input_tokens=7, num_output_tokens=3)],
        [
            response("one", num_input_tokens=7, num_output_tokens=1),
            response(" two", num_input_tokens=7, num_output_tokens=2),
            response(""),
        ],
        [  # a BLS model with `accumulate_tokens`
            response("one", num_input_tokens=7, num_output_tokens=1),
            response("one two", num_input_tokens=7, num_output_tokens=1),
            response("one two", num_input_tokens=7, num_output_tokens=1),
        ],
    ],
)
@pytest.mark.parametrize(("limit", "reason"), [(3, "length"), (4, "stop"), (None, "stop")])
def test_a_newer_ensemble_counts_what_is_new(
    responses: list[Response], limit: int | None, reason: str
) -> None:
    dialect = trtllm.CONTRACT.dialect(ENSEMBLE | COUNTS, COUNTING)
    asked = given(dialect.request(prepared(dialect), ModelReport(), 1.0))
    assert (asked["return_num_input_tokens"], asked["return_num_output_tokens"]) == ([True], [True])
    found, last = read(dialect, responses, max_tokens=limit)
    assert found == "one two"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (7, 3)
    assert last.finish_reason == reason


def test_an_ensemble_may_write_past_its_end() -> None:
    dialect = trtllm.CONTRACT.dialect(ENSEMBLE | {"end_id"}, NOT_COUNTING)
    asked = given(dialect.request(prepared(dialect, ignore_eos=True), ModelReport(), 1.0))
    assert asked["end_id"] == [-1]
    assert "end_id" not in given(dialect.request(prepared(dialect), ModelReport(), 1.0))
    older = trtllm.CONTRACT.dialect(ENSEMBLE, NOT_COUNTING)
    with pytest.raises(InvalidRequestError) as refused:
        older.request(prepared(older, ignore_eos=True), ModelReport(), 1.0)
    assert refused.value.param == "ignore_eos"


def test_choices_are_a_regular_expression_to_an_ensemble() -> None:
    guide = {"guided_decoding_guide_type", "guided_decoding_guide"}
    dialect = trtllm.CONTRACT.dialect(ENSEMBLE | guide, NOT_COUNTING)
    choices = ["a b", "1+1 (two)", "[x]"]
    grammar = Grammar(kind="choice", text=json.dumps(choices), field="structured_outputs.choice")
    asked = given(dialect.request(prepared(dialect, grammar=grammar), ModelReport(), 1.0))
    assert asked["guided_decoding_guide_type"] == ["regex"]
    (guide_text,) = asked["guided_decoding_guide"]
    assert guide_text.startswith("(a b|")
    assert all(re.fullmatch(guide_text, each) for each in choices)
    assert not re.fullmatch(guide_text, "11 two")


def test_an_ensemble_that_cannot_leave_out_the_prompt() -> None:
    dialect = trtllm.CONTRACT.dialect(ENSEMBLE - {"exclude_input_in_output"}, NOT_COUNTING)
    assert read(dialect, [response(PROMPT + "Two.")])[0] == "Two."
    assert read(dialect, [response("Tw"), response("o.")], stream=True)[0] == "Two."


@pytest.mark.parametrize(
    ("contract", "inputs"), [(vllm.CONTRACT, VLLM | COUNTS), (llm_api.CONTRACT, LLM_API)]
)
@pytest.mark.parametrize("reason", ["abort", "cancelled", "error"])
def test_an_answer_that_the_backend_gives_up_is_an_error(contract: Any, inputs: Any, reason: str) -> None:
    dialect = contract.dialect(inputs, NOT_COUNTING)
    with pytest.raises(UpstreamProtocolError, match="gave up"):
        read(dialect, [response("Tw", finish="None"), response("o", finish=reason)], stream=True)


def test_the_llm_api_is_told_to_leave_out_the_prompt_where_it_can_be() -> None:
    name = "sampling_param_exclude_input_from_output"
    for inputs, sent in ((LLM_API, None), (LLM_API | {name}, [True])):
        dialect = llm_api.CONTRACT.dialect(inputs, NOT_COUNTING)
        assert given(dialect.request(prepared(dialect), ModelReport(), 1.0)).get(name) == sent


def test_the_llm_api_is_not_told_of_stop_strings_that_are_to_stay() -> None:
    """It leaves them out: the gateway ends the answer behind them."""
    dialect = llm_api.CONTRACT.dialect(LLM_API | {"sampling_param_stop"}, NOT_COUNTING)
    asked: dict[str, Any] = {"stop": ["END"], "include_stop": True}
    assert "sampling_param_stop" not in given(dialect.request(prepared(dialect, **asked), ModelReport(), 1.0))
    assert read(dialect, [response("one END two")], **asked)[0] == "one END"
    told = given(dialect.request(prepared(dialect, stop=["END"]), ModelReport(), 1.0))
    assert told["sampling_param_stop"] == ["END"]


IMAGE = Image(url="data:image/webp;base64,eA==", at=2, field="f")
ASKED = Message(role="user", content="What is it?", images=(IMAGE,))
SEES = """{% for message in messages %}{% for part in message.content %}
{{- '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}{{ tone }}"""
SEEING = ModelText(ChatTemplate({"default": SEES}, {}), by_character())


def test_the_llm_api_writes_the_prompt_around_an_image_itself() -> None:
    dialect = llm_api.CONTRACT.dialect(LLM_API | {"image_url"}, SEEING)
    asked = given(dialect.request(prepared(dialect, Conversation((ASKED,))), ModelReport(), 1.0))
    assert (asked["text_input"], asked["image_url"]) == (["What is it?"], [IMAGE.url])
    alone = given(dialect.request(prepared(dialect), ModelReport(), 1.0))
    assert "image_url" not in alone


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation((Message(role="system", content="Be kind."), ASKED)),
        Conversation((ASKED,), switches={"tone": "rude"}),
        Conversation((ASKED,), ToolOffer(tools=(Tool(name="f", description=None, parameters={}),))),
    ],
)
def test_what_the_llm_api_cannot_have_beside_an_image(conversation: Conversation) -> None:
    dialect = llm_api.CONTRACT.dialect(LLM_API | {"image_url"}, SEEING)
    with pytest.raises(InvalidRequestError) as refused:
        prepared(dialect, conversation)
    assert refused.value.param in ("f", "tools")


@pytest.mark.parametrize("seed", ["seed", "random_seed"])
def test_the_same_prompt_has_other_answers_unless_a_seed_is_asked_for(seed: str) -> None:
    """The engine's own seed, if a request has none, is the same for all."""
    contract = trtllm.CONTRACT
    dialect = contract.dialect(contract.inputs | {seed}, NOT_COUNTING)

    def sent(**changes: Any) -> Any:
        return given(dialect.request(prepared(dialect, **changes), ModelReport(), 1.0))[seed]

    assert sent() != sent()
    assert sent(seed=7) == [7]
    older = contract.dialect(contract.inputs, NOT_COUNTING)
    assert seed not in given(older.request(prepared(older), ModelReport(), 1.0))
    with pytest.raises(InvalidRequestError):
        older.request(prepared(older, seed=7), ModelReport(), 1.0)


@pytest.mark.parametrize("contract", [vllm.CONTRACT, trtllm.CONTRACT, llm_api.CONTRACT])
def test_beams_of_no_backend_are_passed_on(contract: Contract) -> None:
    """Of vLLM's, the oldest releases alone had them as parameters of sampling."""
    dialect = contract.dialect(contract.inputs, NOT_COUNTING)
    with pytest.raises(InvalidRequestError) as refused:
        prepared(dialect, beam_width=4, length_penalty=2.0)
    assert refused.value.param == "use_beam_search"
    assert prepared(dialect, temperature=0.0).sequences == 1
