"""The Responses API by the official SDK on the demo model; hang-ups on the golden one, which goes on."""

import asyncio
import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.test_load import idle, until
from tests.e2e.test_tools import QUESTIONS, SUNNY
from tests.e2e.test_tools import TOOLS as CHAT_TOOLS
from tests.e2e.up_process import UpProcess
from tests.gateway.openai.sdk_shapes import check_event, check_response

pytestmark = pytest.mark.e2e

MODEL = "chatglm3-demo"
TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
WEATHER = "襄阳今天天气怎么样？"
GREETING = "Good morning to you!"
LOGPROBS = ["message.output_text.logprobs"]


def ask(client: openai.OpenAI, said: Any, **parameters: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": said, "temperature": 0} | parameters)


def raw(client: openai.OpenAI, **parameters: Any) -> httpx.Response:
    body = {"model": MODEL, "input": GREETING, "temperature": 0, **parameters}
    return httpx.post(f"{client.base_url}responses", json=body, timeout=60)


def test_whole_and_streamed_are_the_same(demo: openai.OpenAI) -> None:
    whole = ask(demo, GREETING, instructions="Be brief.")
    assert whole.output_text
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    with demo.responses.stream(
        model=MODEL, input=GREETING, instructions="Be brief.", temperature=0
    ) as stream:
        events = list(stream)
        last = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.output_text == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": GREETING}]
    chat = demo.chat.completions.create(model=MODEL, messages=said, temperature=0)
    assert chat.choices[0].message.content == whole.output_text
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )


def test_the_input_is_counted(demo: openai.OpenAI) -> None:
    for asked in (
        {"instructions": "Be brief."},
        {"tools": TOOLS},
        {"text": {"format": {"type": "json_object"}}},
    ):
        counted = demo.responses.input_tokens.count(model=MODEL, input=GREETING, **asked)
        assert counted.input_tokens == ask(demo, GREETING, max_output_tokens=1, **asked).usage.input_tokens


def test_all_that_is_sent_is_what_the_sdk_knows(demo: openai.OpenAI) -> None:
    for asked in ({}, {"include": LOGPROBS, "top_logprobs": 2}, {"input": WEATHER, "tools": TOOLS}):
        check_response(raw(demo, **asked).json())
        events = [each.split("\n") for each in raw(demo, **asked, stream=True).text.split("\n\n") if each]
        documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name for name, _ in events] == [f"event: {each['type']}" for each in documents]
        assert [each["sequence_number"] for each in documents] == list(range(len(documents)))
        for document in documents:
            check_event(document)


def test_log_probabilities_are_those_of_the_chat(demo: openai.OpenAI) -> None:
    (part,) = ask(demo, GREETING, include=LOGPROBS, top_logprobs=2).output[0].content
    said: Any = [{"role": "user", "content": GREETING}]
    chat = demo.chat.completions.create(
        model=MODEL, messages=said, temperature=0, logprobs=True, top_logprobs=2
    )
    content: Any = [token.to_dict() for token in chat.choices[0].logprobs.content]
    for top in (top for token in content for top in token["top_logprobs"]):
        top["bytes"] = top["bytes"] or []  # of a special token: Responses have no null there
    assert [token.to_dict() for token in part.logprobs] == content
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def test_log_probabilities_beside_tools_are_those_of_the_text(demo: openai.OpenAI) -> None:
    """The same for a response, a chat, and either streamed; a call has none."""
    asked: dict[str, Any] = {"tools": TOOLS, "include": LOGPROBS, "top_logprobs": 2}
    (call,) = ask(demo, WEATHER, **asked).output
    assert call.type == "function_call"
    events = list(ask(demo, WEATHER, stream=True, **asked))
    assert not any("output_text" in event.type for event in events)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": SUNNY}
    said = [{"role": "user", "content": WEATHER}, call, result]
    (part,) = ask(demo, said, **asked).output[0].content
    assert bytes(each for token in part.logprobs for each in token.bytes).decode() == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    deltas = [
        event for event in ask(demo, said, stream=True, **asked) if event.type == "response.output_text.delta"
    ]
    assert "".join(event.delta for event in deltas) == part.text
    assert [token.token for event in deltas for token in event.logprobs] == [
        token.token for token in part.logprobs
    ]


@pytest.mark.parametrize(("text", "name", "arguments"), QUESTIONS)
def test_a_question_is_a_call_streamed_and_not(
    text: str, name: str, arguments: dict[str, Any], demo: openai.OpenAI
) -> None:
    (whole,) = ask(demo, text, tools=TOOLS).output
    with demo.responses.stream(model=MODEL, input=text, tools=TOOLS, temperature=0) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_response().output
    for call in (whole, streamed):
        assert (call.type, call.status, call.name) == ("function_call", "completed", name)
        assert json.loads(call.arguments) == arguments
        assert len(call.call_id) >= 9
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in pieces) == streamed.arguments


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_a_result_an_answer_and_on(streamed: bool, demo: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": WEATHER}]
    if streamed:
        with demo.responses.stream(model=MODEL, input=said, tools=TOOLS, temperature=0) as stream:
            response: Any = stream.get_final_response()
    else:
        response = ask(demo, said, tools=TOOLS)
    said += response.output
    (call,) = response.output
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": SUNNY})
    response = ask(demo, said, tools=TOOLS)
    assert response.output_text == "襄阳的天气：晴，21 °C。"
    said += [*response.output, {"role": "user", "content": "What is 37 * (12 + 9)?"}]
    (call,) = ask(demo, said, tools=TOOLS).output
    assert (call.name, json.loads(call.arguments)) == ("calculate", {"expression": "37 * (12 + 9)"})


def test_choices_of_tools_are_enforced(demo: openai.OpenAI) -> None:
    named = {"type": "function", "name": "calculate"}
    (call,) = ask(demo, "What is 3 + 4?", tools=TOOLS, tool_choice=named).output
    assert (call.name, json.loads(call.arguments)) == ("calculate", {"expression": "3 + 4"})
    none = ask(demo, WEATHER, tools=TOOLS, tool_choice="none")
    assert [item.type for item in none.output] == ["message"]
    assert none.output_text


def test_an_answer_that_is_cut_short_is_incomplete(demo: openai.OpenAI) -> None:
    whole = ask(demo, GREETING)
    cut = ask(demo, GREETING, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output[0].status, cut.usage.output_tokens) == ("incomplete", 3)
    assert whole.output_text.startswith(cut.output_text)
    events = list(ask(demo, GREETING, max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == cut.output_text


def test_what_needs_a_memory_is_refused(demo: openai.OpenAI) -> None:
    for asked in ({"conversation": "c"}, {"background": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError, match="keeps responses") as refused:
            ask(demo, GREETING, **asked)
        assert refused.value.param == next(iter(asked))
    with pytest.raises(openai.NotFoundError):
        demo.responses.retrieve("resp_1")


def test_refusals_of_the_model_name_the_item(demo: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_2", "output": ""}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as stray:
            ask(demo, [{"role": "user", "content": "?"}, call, result], instructions="s", stream=stream)
        assert stray.value.param == "input.2"
        with pytest.raises(openai.BadRequestError) as missing:
            ask(demo, [{"role": "user", "content": "?"}, call], instructions="s", stream=stream)
        assert missing.value.param == "input.1"
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(demo, GREETING * 5000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")


class Trip(BaseModel):
    city: str = Field(max_length=10)
    days: int = Field(ge=1, le=9)
    kind: Literal["大", "small"] | None


def test_the_sdk_parses_what_it_asked_for(demo: openai.OpenAI) -> None:
    """At a temperature at which the model alone writes no JSON."""
    asked: dict[str, Any] = {"model": MODEL, "input": WEATHER, "temperature": 1.5, "text_format": Trip}
    asked["extra_body"] = {"seed": 5}
    whole = demo.responses.parse(**asked)
    assert isinstance(whole.output_parsed, Trip)
    with demo.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_parsed == whole.output_parsed
    assert streamed.output_text == whole.output_text
    said = [{"role": "user", "content": WEATHER}, *whole.output, {"role": "user", "content": "And then?"}]
    anything = ask(demo, said, text={"format": {"type": "json_object"}}, max_output_tokens=60)
    assert anything.output_text.startswith("{")


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_name(demo: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"not": {"type": "string"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(demo, GREETING, text={"format": form}, stream=stream)
        assert refused.value.param == "text.format.schema"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_frees_the_engine(stream: bool, patient: UpProcess) -> None:
    await idle(patient)  # else what runs may be an earlier test's
    cancels = patient.gauge("tritongate_client_cancels_total", model="chatglm3")
    async with openai.AsyncOpenAI(
        base_url=patient.base_url + "/v1", api_key="unused", max_retries=0
    ) as client:
        begun = asyncio.Event()

        async def one() -> None:
            answer: Any = await client.responses.create(
                model="chatglm3",
                input="你好",
                max_output_tokens=8000,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
            async for event in answer:
                if event.type == "response.output_text.delta":
                    begun.set()

        asking = asyncio.create_task(one())
        if stream:
            await begun.wait()
        await until(lambda: patient.gauge("tritongate_engine_requests_running") == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: patient.gauge("tritongate_client_cancels_total", model="chatglm3") == cancels + 1)
        await idle(patient)
