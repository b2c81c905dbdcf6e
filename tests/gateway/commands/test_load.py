"""Load on the gateway's own application over a fake upstream, from real processes."""

import json
import statistics
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import pytest
import uvicorn

from gateway.app import create_app
from gateway.commands.load import LoadPool, Workload, closed_loop, open_loop
from gateway.commands.load_rows import Answer
from gateway.core.events import Event
from gateway.core.request import Conversation, Generation, PlainText, TokenIds
from gateway.process.listeners import base_url, bind
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import settings


@pytest.fixture
def upstream() -> FakeUpstream:
    def script(request: Generation) -> AsyncGenerator[Event, None]:
        return say(*("abc" * 90)[: request.max_tokens], finish="length")

    return FakeUpstream(script)


@pytest.fixture
def url(upstream: FakeUpstream) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(settings(), upstream), log_level="error"))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    serving.start()
    yield base_url(listener)
    server.should_exit = True
    serving.join()


def test_a_closed_loop_asks_as_often_as_it_was_told(url: str, upstream: FakeUpstream) -> None:
    workload = Workload(url=url, model="glm", ids=5, shared=2, out=3)
    with LoadPool(2) as pool:
        row = closed_loop(pool, workload, "row", clients=3, requests=8)
        whole = closed_loop(
            pool, Workload(url=url, model="glm", out=2, stream=False), "row", clients=1, requests=2
        )
    assert (row.clients, row.requests, row.failed, row.output_tokens, row.pieces) == (3, 8, 0, 3, 3)
    assert (whole.requests, whole.failed, whole.output_tokens, whole.pieces) == (2, 0, 2, 1)
    asked = upstream.requests[:8]
    assert all(request.stream and request.ignore_eos and request.max_tokens == 3 for request in asked)
    prompts = {request.prompt for request in asked}
    assert len(prompts) == 8
    assert {len(prompt.ids) for prompt in prompts if isinstance(prompt, TokenIds)} == {5}
    assert len({prompt.ids[:2] for prompt in prompts if isinstance(prompt, TokenIds)}) == 1


def test_an_open_loop_asks_whatever_becomes_of_it(url: str, upstream: FakeUpstream) -> None:
    with LoadPool(1) as pool:
        row = open_loop(pool, Workload(url=url, model="glm", out=1), "row", rate=40.0, seconds=1.0)
        with pytest.raises(RuntimeError, match="status 404"):
            open_loop(pool, Workload(url=url, model="none"), "row", rate=40.0, seconds=0.5)
    assert row.rate == 40.0
    assert row.requests == len(upstream.requests) > 10
    assert row.failed == 0


def test_a_name_always_asks_the_same() -> None:
    workload = Workload(url="http://x", model="m", ids=9)
    assert workload.body("a") == workload.body("a") != workload.body("b")
    body = json.loads(workload.body("a"))
    assert len(body["prompt"]) == 9
    assert body["stream_options"] == {"include_usage": True}
    assert workload.path == "/v1/completions"
    assert Workload(url="http://x", model="m").path == "/v1/chat/completions"
    assert body["ignore_eos"] is True
    as_given = replace(workload, also={"ignore_eos": False, "response_format": {"type": "json_object"}})
    assert json.loads(as_given.body("a"))["ignore_eos"] is False


def test_lengths_may_be_as_mixed_as_those_of_real_traffic() -> None:
    workload = Workload(url="", model="glm", ids=100, shared=20, out=50, spread=1.0, also={"top_p": 0.8})
    bodies = [json.loads(workload.body(str(number))) for number in range(400)]
    prompts, outs = [len(body["prompt"]) for body in bodies], [body["max_tokens"] for body in bodies]
    assert 90 < statistics.median(prompts) < 110
    assert 43 < statistics.median(outs) < 57
    assert min(prompts) > 20
    assert max(prompts) == 20 + 8 * 80
    assert 1 <= min(outs) < 10
    assert max(outs) == 8 * 50
    assert abs(statistics.correlation(prompts, outs)) < 0.2
    assert {body["top_p"] for body in bodies} == {0.8}
    assert bodies == [json.loads(workload.body(str(number))) for number in range(400)]
    words = Workload(url="", model="glm", words=100, chat=True, spread=1.0)
    said = [json.loads(words.body(str(number)))["messages"][0]["content"] for number in range(9)]
    assert len({len(text) for text in said}) > 5


def test_later_turns_repeat_what_was_said(url: str, upstream: FakeUpstream) -> None:
    words = Workload(url=url, model="glm", words=2, out=3, turns=3)
    with LoadPool(1) as pool:
        row = closed_loop(pool, replace(words, chat=True), "chat", clients=1, requests=1)
        chats = [request.prompt for request in upstream.requests]
        closed_loop(pool, words, "text", clients=1, requests=1)
        with pytest.raises(RuntimeError, match="0 ids of 256 tokens"):
            closed_loop(pool, Workload(url=url, model="glm", ids=5, turns=3), "ids", clients=1, requests=1)
    assert (row.requests, row.failed, row.output_tokens) == (3, 0, 3)
    last = chats[-1]
    assert isinstance(last, Conversation)
    assert [message.role for message in last.messages] == ["user", "assistant"] * 2 + ["user"]
    assert last.messages[1].content == "abc"
    assert all(
        isinstance(chat, Conversation) and last.messages[: len(chat.messages)] == chat.messages
        for chat in chats
    )
    texts = [
        request.prompt.text for request in upstream.requests[3:6] if isinstance(request.prompt, PlainText)
    ]
    assert texts[1].startswith(texts[0] + "abc ")
    assert texts[2].startswith(texts[1] + "abc ")


def test_turns_of_ids_have_the_answers_ids() -> None:
    workload = Workload(url="", model="glm", ids=5, shared=2, turns=2)
    first = json.loads(workload.body("a"))
    second = json.loads(workload.body("a/1", [("a", Answer(sent=0.0, ids=[7, 8], tokens=2))]))
    assert first["return_token_ids"]
    assert second["prompt"][:7] == [*first["prompt"], 7, 8]
    assert len(second["prompt"]) == 5 + 2 + 3


def test_prompts_may_be_words(url: str, upstream: FakeUpstream) -> None:
    workload = Workload(url=url, model="glm", words=7, out=3)
    with LoadPool(1) as pool:
        closed_loop(pool, workload, "words", clients=2, requests=2)
    prompts = [request.prompt for request in upstream.requests]
    assert all(isinstance(prompt, PlainText) for prompt in prompts)
    texts = {prompt.text for prompt in prompts if isinstance(prompt, PlainText)}
    assert len(texts) == 2
    assert {len(text.split()) for text in texts} == {7}
