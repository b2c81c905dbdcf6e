"""`/tokenize` and `/detokenize`, on the fake upstream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.core.events import Accepted, Event
from gateway.core.request import Conversation, Generation
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import MESSAGES, Served, in_process, on_socket, until

TOOL: Any = {"type": "function", "name": "now"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with in_process(FakeUpstream()) as served:
        yield served


async def ask(served: Served, path: str, **body: Any) -> Any:
    return await served.http.post(path, json={"model": "glm", **body})


async def test_text_and_back(served: Served) -> None:
    answer = await ask(served, "/tokenize", prompt="hé")
    assert answer.json() == {"count": 2, "max_model_len": 64, "tokens": [104, 233]}
    back = await ask(served, "/detokenize", tokens=answer.json()["tokens"])
    assert back.json() == {"prompt": "hé"}
    shown = await ask(served, "/tokenize", prompt="hé", return_token_strs=True)
    assert shown.json()["token_strs"] == ["h", "é"]
    assert served.metric("requests_total", route="/tokenize", model="glm", status="200") == 2
    assert served.metric("requests_in_flight", model="glm") == 0


async def test_an_input_is_counted_by_the_sdk() -> None:
    async with on_socket(FakeUpstream()) as served:
        count = served.sdk.responses.input_tokens.count
        counted = await count(model="glm", input="hé", instructions="Be brief.", tools=[TOOL])
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", len("Be brief.hé"))
        assert (await count(model="glm", input=[{"role": "user", "content": "hé"}])).input_tokens == 2
        assert (await count(model="glm", instructions="Be brief.")).input_tokens == len("Be brief.")
        prompt = served.upstream.tokenizations[0].prompt
        assert isinstance(prompt, Conversation)
        assert [tool.name for tool in prompt.offer.tools] == ["now"] if prompt.offer else False
        for asked, param in (
            ({}, "input"),
            ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": "a", "conversation": "c"}, "conversation"),
            ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await count(model="glm", **asked)
            assert refused.value.param == param
        assert not served.upstream.requests


async def test_tokenizations_are_no_generations() -> None:
    async with on_socket(FakeUpstream()) as served:
        await ask(served, "/tokenize", prompt="a")
        await ask(served, "/detokenize", tokens=[104])
        served.upstream.tokenizing = lambda _: asyncio.sleep(60, Tokens())
        await served.hang_up(ask(served, "/tokenize", prompt="a"))
        await until(
            lambda: served.metric("requests_total", route="/tokenize", model="glm", status="499") == 1
        )
        for name in ("overhead_seconds_count", "client_cancels_total"):
            assert served.metric(name, model="glm") == 0


async def test_a_conversation(served: Served) -> None:
    answer = await ask(served, "/tokenize", messages=MESSAGES)
    assert answer.json()["count"] == 2
    (asked,) = served.upstream.tokenizations
    assert isinstance(asked.prompt, Conversation)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/tokenize", {"messages": MESSAGES}, "messages"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
        ("/v1/responses/input_tokens", {"input": "a"}, "input"),
    ],
)
async def test_errors_name_the_field(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    async def refuse(_request: Tokenization) -> Tokens:
        raise InvalidRequestError("no")

    served.upstream.tokenizing = refuse
    refused = await ask(served, path, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    unknown = await ask(served, path, **body, model="other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    wrong = await ask(served, path, **body | {param: 5})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
    text = await served.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 415


async def test_a_key_is_needed_where_there_are_keys() -> None:
    keys = [{"name": "a", "key": "secret"}]
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert (await ask(served, path, **body)).status_code == 401
        assert (await served.http.get("/tokenizer_info")).status_code == 401


async def test_a_full_engine_does_not_keep_tokens_from_being_counted() -> None:
    upstream = FakeUpstream(lambda _: say(*["a"] * 10_000, gap_s=0.01))
    async with on_socket(upstream, max_in_flight=1, max_waiting=0) as served:
        chatting = asyncio.create_task(served.chat())
        await until(lambda: upstream.running == 1)
        assert (await served.chat()).status_code == 429
        assert (await ask(served, "/tokenize", prompt="a")).status_code == 200
        chatting.cancel()
        await served.until_idle()


async def test_a_client_that_leaves_cancels_the_question() -> None:
    async def hang(_request: Tokenization) -> Tokens:
        await asyncio.sleep(60)
        raise AssertionError

    upstream = FakeUpstream()
    upstream.tokenizing = hang
    async with on_socket(upstream) as served:
        asking = asyncio.create_task(ask(served, "/tokenize", prompt="a"))
        await until(lambda: upstream.running == 1)
        asking.cancel()
        await until(lambda: upstream.cancelled == 1)
        assert upstream.running == 0


async def test_the_gauges_count_places_of_generations_alone() -> None:
    gate = asyncio.Event()

    async def hold(_request: Generation) -> AsyncIterator[Event]:
        yield Accepted(prompt_tokens=1)
        await gate.wait()

    upstream = FakeUpstream(hold)
    tokenize = upstream.tokenizing

    async def slow(request: Tokenization) -> Tokens:
        await gate.wait()
        return await tokenize(request)

    upstream.tokenizing = slow
    async with in_process(upstream, max_in_flight=64, max_waiting=0) as served:
        body = {"model": "glm", "prompt": "a"}
        tokenizing = [asyncio.create_task(served.http.post("/tokenize", json=body)) for _ in range(9)]
        answering = asyncio.create_task(served.chat(n=3))
        await until(lambda: any(each.done() for each in tokenizing))
        await until(lambda: served.gateway.admission.in_flight == 3)
        assert served.metric("requests_in_flight", model="glm") == 3
        assert served.metric("requests_waiting", model="glm") == 0
        refused = next(each for each in tokenizing if each.done()).result()
        assert "tokenizations at work" in refused.json()["error"]["message"]
        gate.set()
        await asyncio.gather(answering, *tokenizing)


async def test_the_tokenizer_is_described() -> None:
    """As lm-eval's remote tokenizer asks: it names no model, and needs `eos_token`."""
    upstream = FakeUpstream(models=("glm",))
    async with in_process(upstream) as served:
        info = await served.http.get("/tokenizer_info")
        assert (info.status_code, info.json()) == (
            200,
            {
                "tokenizer_class": "ChatGLMTokenizer",
                "bos_token": None,
                "eos_token": "</s>",
                "pad_token": "<unk>",
                "model_max_length": 64,
                "vocab_size": 5,
            },
        )
        tokens = await served.http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
        assert tokens.json()["tokens"] == [104, 105]
        upstream.chat_format = "glm4"
        info = await served.http.get("/tokenizer_info", params={"model": "glm"})
        assert (info.json()["tokenizer_class"], info.json()["eos_token"]) == (
            "ChatGLM4Tokenizer",
            "<|endoftext|>",
        )
        upstream.chat_format = None
        other = await served.http.get("/tokenizer_info")  # of another backend
        assert (other.status_code, other.json()["error"]["param"]) == (400, "model")
        upstream.ready = False
        assert (await served.http.get("/tokenizer_info")).status_code == 503


async def test_of_several_tokenizers_one_has_to_be_named(served: Served) -> None:
    several = await served.http.get("/tokenizer_info")
    assert (several.status_code, several.json()["error"]["param"]) == (400, "model")
    assert (await served.http.get("/tokenizer_info?model=org/glm-2")).status_code == 200
    other = await served.http.get("/tokenizer_info?model=other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
