"""Models of other people's backends behind the gateway: the same promises as for ours, on each contract."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.foreign_server import INPUTS, Foreign
from tests.e2e.relay import Relay
from tests.e2e.serve_process import ServeProcess
from tests.e2e.up_process import wait_until
from tests.ports import free_ports
from tests.processes import answers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WEATHER: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(params=list(INPUTS))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gateway(foreign: Foreign) -> ServeProcess:
    return foreign.gateway


@pytest.fixture
async def sdk(gateway: ServeProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.sdk() as sdk:
        yield sdk


def say(text: str) -> Any:
    return [{"role": "user", "content": f"SAY:{text}"}]


def tokens_of(text: str) -> list[str]:
    """As the played models cut their answers."""
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def counted(model: str, text: str) -> int:
    """Some played models count their own tokens; those of the others are counted by the tokenizer's."""
    return len(tokens_of(text)) if model in ("vllm", "ensemble") else len(text)


async def test_an_answer_that_does_not_stream(sdk: openai.AsyncOpenAI, model: str) -> None:
    answer = await sdk.chat.completions.create(model=model, messages=say("Good morning!"), max_tokens=50)
    assert answer.choices[0].message.content == "Good morning!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == counted(model, "Good morning!")
    prompt = "<|user|>SAY:Good morning!\n<|assistant|>"
    assert answer.usage.prompt_tokens == counted(model, prompt)


async def test_a_streamed_answer_is_the_same(sdk: openai.AsyncOpenAI, model: str) -> None:
    stream = await sdk.chat.completions.create(
        model=model, messages=say("aaaaaa Good"), max_tokens=50, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "aaaaaa Good"
    assert len([piece for piece in pieces if piece]) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == counted(model, "aaaaaa Good")


async def test_tool_calls_are_read(sdk: openai.AsyncOpenAI, model: str) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"}}</tool_call>'
    answer = await sdk.chat.completions.create(model=model, messages=say(call), tools=WEATHER, max_tokens=500)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    function: Any = choice.message.tool_calls[0]
    assert (function.function.name, json.loads(function.function.arguments)) == (
        "weather",
        {"city": "Berlin"},
    )


async def test_a_call_is_streamed_as_it_is_written(sdk: openai.AsyncOpenAI, model: str) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city":  "Berlin", "days": [1, 2]}}</tool_call>'
    stream = await sdk.chat.completions.create(
        model=model, messages=say("Look: " + call), tools=WEATHER, max_tokens=500, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function and part.function.name] == ["weather"]
    fragments = [part.function.arguments or "" for part in parts if part.function]
    assert "".join(fragments) == '{"city":  "Berlin", "days": [1, 2]}'
    assert len([fragment for fragment in fragments if fragment]) > 5
    assert "".join(choice.delta.content or "" for choice in choices) == "Look:"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_reasoning_comes_apart(sdk: openai.AsyncOpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": say("<think>Hm, hm.</think>Two."), "max_tokens": 100}
    answer = await sdk.chat.completions.create(**asked)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == ("Hm, hm.", "Hm, hm.", "Two.")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("Hm, hm.")
    stream = await sdk.chat.completions.create(**asked, stream=True)
    deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
    thought = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thought) == "Hm, hm."
    assert len([each for each in thought if each]) > 1
    assert "".join(delta.content or "" for delta in deltas) == "Two."


async def test_reasoning_that_the_template_opens_and_the_limit_ends(
    sdk: openai.AsyncOpenAI, model: str
) -> None:
    asked: Any = {"model": model, "messages": say("Hm, hm.</think>Two."), "stream": False}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = await sdk.chat.completions.create(**asked, max_tokens=100)
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, hm.", "\nTwo.".strip())
    cut = await sdk.chat.completions.create(**asked, max_tokens=1)
    message = cut.choices[0].message
    assert message.content == ""
    assert "Hm, hm.".startswith(message.reasoning_content)
    assert cut.choices[0].finish_reason == "length"


async def test_earlier_reasoning_reaches_the_template(gateway: ServeProcess, model: str) -> None:
    earlier = {"role": "assistant", "content": "One.", "reasoning_content": "12345"}
    body: Any = {"model": model, "messages": [*say("a"), earlier, *say("b")], "max_tokens": 9}
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        response = await client.post("/v1/chat/completions", json=body | {"reasoning_effort": "low"})
        earlier.pop("reasoning_content")
        without = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-tritongate-ignored"] == "reasoning_effort"
    tokens = [each.json()["usage"]["prompt_tokens"] for each in (response, without)]
    assert tokens[0] - tokens[1] == counted(model, "<think>12345</think>")


async def test_reasoning_and_a_call_in_a_response(sdk: openai.AsyncOpenAI, model: str) -> None:
    call = '<think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Berlin"}}</tool_call>'
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
    thought, arguments = "", []
    async with sdk.responses.stream(model=model, input=f"SAY:{call}", tools=tools) as stream:
        async for event in stream:
            if event.type == "response.reasoning_text.delta":
                thought += event.delta
            elif event.type == "response.function_call_arguments.delta":
                arguments.append(event.delta)
        response = await stream.get_final_response()
    reasoning, function = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == [thought] == ["Hm."]
    assert function.type == "function_call"
    assert function.arguments == "".join(arguments) == '{"city": "Berlin"}'
    assert len(arguments) > 3
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    result = {"type": "function_call_output", "call_id": function.call_id, "output": "SAY:Sunny."}
    history: Any = [{"role": "user", "content": "?"}, *[item.to_dict() for item in response.output], result]
    again = await sdk.responses.create(model=model, input=history, tools=tools)
    assert again.output_text == "Sunny."


async def test_a_failure_says_nothing_of_the_backends_insides(sdk: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.chat.completions.create(model=model, messages=say("!"), max_tokens=5)
    assert caught.value.status_code == 502
    assert not any(word in str(caught.value) for word in ("Traceback", "secret", "broken"))


async def test_a_failure_in_the_middle_of_an_answer(sdk: openai.AsyncOpenAI, model: str) -> None:
    said: list[str | None] = []
    reasons: list[str | None] = []

    async def read() -> None:
        messages = say("Hello there, all of you!late")
        stream = await sdk.chat.completions.create(model=model, messages=messages, max_tokens=40, stream=True)
        async for chunk in stream:
            said.extend(choice.delta.content for choice in chunk.choices)
            reasons.extend(choice.finish_reason for choice in chunk.choices)

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert not any(word in str(caught.value) for word in ("Traceback", "secret", "broken", "N/A"))
    # Two tokens. A second text that may be a delta or the whole is not told before there is a third.
    assert "".join(filter(None, said)) in ("He", "Hello ", "Hel")
    assert set(reasons) == {None}


async def test_log_probabilities_of_vllm(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="vllm", messages=say("Hello"), max_tokens=9, logprobs=True, top_logprobs=2
    )
    listed = answer.choices[0].logprobs
    assert listed is not None
    assert listed.content is not None
    assert [each.token for each in listed.content] == ["Hel", "lo"]
    assert [[top.logprob for top in each.top_logprobs] for each in listed.content] == [[-0.5, -1.5]] * 2


async def test_a_prompt_beyond_the_context_of_vllm(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="vllm", messages=say("!long"), max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    assert "length 9" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("embeds", ["plain", "vllm_embeds"])
async def test_texts_become_vectors(sdk: openai.AsyncOpenAI, embeds: str) -> None:
    answer = await sdk.embeddings.create(model=embeds, input=["Hello", "Hi"])
    other = 0.5 if embeds == "plain" else 0.25
    assert [each.embedding[:2] for each in answer.data] == [[5.0, other], [2.0, other]]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 7
    plain = await sdk.embeddings.create(model=embeds, input="Hello", encoding_format="float")
    assert plain.data[0].embedding == answer.data[0].embedding


async def test_ids_and_a_length_of_vectors(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.embeddings.create(model="vllm_embeds", input=[[1, 2, 3]], dimensions=2)
    assert answer.data[0].embedding == [3.0, 0.25]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"input": [[1, 2, 3]]}, "input"),
        ({"input": "Hi", "dimensions": 2}, "dimensions"),
    ]
    for asked, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.embeddings.create(model="plain", **asked)
        assert caught.value.param == param


@pytest.mark.parametrize("embeds", ["plain", "vllm_embeds"])
async def test_a_model_that_embeds_writes_no_text(sdk: openai.AsyncOpenAI, embeds: str) -> None:
    with pytest.raises(openai.BadRequestError, match="embed") as caught:
        await sdk.chat.completions.create(model=embeds, messages=say("Hi"))
    assert caught.value.param == "model"


async def test_a_model_that_writes_text_does_not_embed(sdk: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="embed") as caught:
        await sdk.embeddings.create(model=model, input="Hi")
    assert caught.value.param == "model"


async def test_an_adapter_is_a_model(sdk: openai.AsyncOpenAI) -> None:
    listed = {each.id: each.to_dict().get("parent") for each in (await sdk.models.list()).data}
    assert (listed["tuned"], listed["vllm"]) == ("vllm", None)
    chat = await sdk.chat.completions.create(model="tuned", messages=say("Hello"))
    assert (chat.choices[0].message.content, chat.model) == ("tuned: Hello", "tuned")
    response = await sdk.responses.create(model="tuned", input="SAY:Hello")
    assert response.output_text == "tuned: Hello"
    stream = await sdk.completions.create(model="tuned", prompt="SAY:Hello", max_tokens=9, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "tuned: Hello"


@pytest.mark.parametrize("absent", ["absent", "other"])
async def test_an_adapter_that_the_backend_does_not_have(sdk: openai.AsyncOpenAI, absent: str) -> None:
    with pytest.raises(openai.BadRequestError, match="adapter") as caught:
        await sdk.chat.completions.create(model=absent, messages=say("Hello"))
    assert caught.value.param == "model"


async def test_a_model_that_cannot_stream_answers_in_one_piece(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(model="once", messages=say("Hello"), stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.delta.content for choice in choices if choice.delta.content] == ["Hello"]
    assert choices[-1].finish_reason == "stop"


async def test_several_choices_of_vllm(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="vllm", messages=say("Hello"), n=3)
    assert [choice.message.content for choice in answer.choices] == ["Hello"] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_tokens_are_counted_by_the_gateway(gateway: ServeProcess, model: str) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        response = await client.post("/tokenize", json={"model": model, "messages": say("Hi")})
        assert response.json()["count"] == len("<|user|>SAY:Hi\n<|assistant|>")
        back = await client.post("/detokenize", json={"model": model, "tokens": response.json()["tokens"]})
        assert back.json()["prompt"] == "<|user|>SAY:Hi\n<|assistant|>"


async def test_ids_go_in_and_come_out(gateway: ServeProcess) -> None:
    ids = [ord(letter) - 32 for letter in "SAY:Hello~more"]
    body = {"model": "inner", "prompt": ids, "max_tokens": 9, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    assert choice["token_ids"] == [ord(letter) - 32 for letter in "Hello"]
    assert choice["prompt_token_ids"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_stop_an_answer(sdk: openai.AsyncOpenAI, *, stream: bool) -> None:
    more = {"stop_token_ids": [ord("l") - 32]}
    asked: Any = {"model": "inner", "messages": say("Hello"), "max_tokens": 9, "extra_body": more}
    if not stream:
        choice = (await sdk.chat.completions.create(**asked)).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("He", "stop")
        return
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "He"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_an_answer_may_go_on_past_its_end(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "inner", "messages": say("ab~cd"), "extra_body": {"ignore_eos": True}}
    answer = await sdk.chat.completions.create(**asked)
    assert answer.choices[0].message.content == "ab~cd"


async def test_where_a_requests_time_went(gateway: ServeProcess) -> None:
    """In its usage and in its log line; none of these backends tells how long it waited there.

    Nor when the first token of an answer was there that comes whole.
    """
    asked: dict[str, Any] = {"prompt": "SAY:Hello", "max_tokens": 9, "include_timings": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    told: dict[str, Any] = {}
    whole = set()
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        for model in INPUTS:
            for more in ({}, streamed):
                answer = await client.post("/v1/completions", json={"model": model} | asked | more)
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
                last = next(line for line in lines if "timings" in line)
                told[answer.headers["x-request-id"]] = json.loads(last)["usage"]["timings"]
                if not more:
                    whole.add(answer.headers["x-request-id"])

    def logged() -> dict[str, Any]:
        lines = [json.loads(line) for line in gateway.output.splitlines() if "duration_ms" in line]
        return {line["request_id"]: line for line in lines}

    await asyncio.to_thread(wait_until, lambda: told.keys() <= logged().keys())
    for request_id, times in told.items():
        line = logged()[request_id]
        assert times.pop("engine_queued_ms") is None
        assert "engine_queued_ms" not in line
        if request_id in whole:
            assert times["first_token_ms"] is times["generation_ms"] is None
            assert line.keys().isdisjoint({"first_token_ms", "generation_ms"})
            assert 0 <= times["queued_ms"] <= times["server_ms"] <= line["duration_ms"]
            continue
        assert 0 <= times["queued_ms"] <= times["first_token_ms"] == line["first_token_ms"]
        assert times["first_token_ms"] + times["generation_ms"] <= times["server_ms"] + 0.002  # rounded
        assert times["generation_ms"] <= line["generation_ms"] <= line["duration_ms"]


class Early(ServeProcess):
    """A gateway that is there before its Triton."""

    def is_ready(self) -> bool:
        return answers(self.base_url + "/health")


async def test_requests_wait_for_the_first_triton(foreign: Foreign) -> None:
    """With what an autoscaler reads: that somebody waits."""
    (port,) = free_ports(1)
    wait = ("--models", "vllm", "--upstream-wait-s", "90", "--ping-interval-s", "0.2")
    with Early(f"127.0.0.1:{port}", *wait, "--vllm-metrics") as gateway:
        url, asked = gateway.base_url + "/v1/completions", {"model": "vllm", "prompt": "SAY:Hello"}
        async with httpx.AsyncClient(timeout=100) as client:
            whole = asyncio.create_task(client.post(url, json=asked))
            streamed = asyncio.create_task(client.post(url, json=asked | {"stream": True}))

            def waiting(name: str = "tritongate_requests_waiting", **labels: str) -> float:
                return gateway.gauge(name, **labels or {"model": "vllm"})

            await asyncio.to_thread(wait_until, lambda: waiting() == 2)
            assert waiting("vllm:num_requests_waiting", model_name="vllm") == 2
            assert waiting("tritongate_requests_in_flight") == 0
            relay = Relay(foreign.server.grpc, port)
            try:
                assert (await whole).json()["choices"][0]["text"] == "Hello"
                text = (await streamed).text
                assert text.startswith(": ping")
                assert text.rstrip().endswith("[DONE]")
                assert waiting() == 0
            finally:
                relay.close()
