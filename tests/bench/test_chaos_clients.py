"""That the clients of `bench.chaos` see what must not be."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bench.chaos_clients import Case, Clients, Ending, KserveCase, Manner
from bench.resume import Answer

DONE = "[DONE]"


def chunk(text: str = "", reason: str | None = None, number: str = "a") -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return json.dumps({"id": number, "choices": [choice]})


RIGHT = (chunk("one "), chunk("two"), chunk(reason="stop"), DONE)
ERROR = json.dumps({"error": {"message": "gone"}})


def answer_of(*events: str) -> Answer:
    answer = Answer()
    for event in events:
        if event != DONE:
            answer.add(json.loads(event))
    return answer


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    clients = Clients("http://gateway", "127.0.0.1:1", "glm")
    yield clients
    await clients.close()


async def asked(clients: Clients, *events: str, status: int = 200, number: str | None = None) -> Ending:
    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"X-Request-Id": number or request.headers["x-request-id"]}
        text = events[0] if status != httpx.codes.OK else "".join(f"data: {each}\n\n" for each in events)
        return httpx.Response(status, text=text, headers=headers)

    clients.http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(answer))
    body: dict[str, Any] = {"stream": True}
    result = await clients.chat(random.Random(0), Case(body, answer_of(*RIGHT)), Manner.STREAMS)
    return result.ending


@pytest.mark.parametrize(
    ("events", "ending"),
    [
        (RIGHT, Ending.ANSWERED),
        ((RIGHT[0], ERROR, DONE), Ending.BROKEN_OFF),
        (RIGHT[:-1], Ending.WRONG),
        (RIGHT[:2], Ending.WRONG),
        ((*RIGHT, DONE), Ending.WRONG),
        ((*RIGHT[:-1], *RIGHT), Ending.WRONG),
        ((RIGHT[0], ERROR, RIGHT[1], DONE), Ending.WRONG),
        ((chunk("two"), chunk(reason="stop"), DONE), Ending.WRONG),
        ((chunk("two"), ERROR, DONE), Ending.WRONG),
        ((RIGHT[0], chunk("two", number="b"), RIGHT[2], DONE), Ending.WRONG),
    ],
)
async def test_a_stream_has_one_ending_and_is_nobody_elses(
    clients: Clients, events: tuple[str, ...], ending: Ending
) -> None:
    assert await asked(clients, *events) is ending


async def test_an_error_says_what_is_wrong_and_an_answer_is_to_its_own_request(clients: Clients) -> None:
    assert await asked(clients, ERROR, status=503) is Ending.REFUSED
    assert await asked(clients, "busy", status=503) is Ending.WRONG
    assert await asked(clients, *RIGHT, number="another's") is Ending.WRONG


class Broken(httpx.AsyncByteStream):
    """The beginning of a stream whose server dies."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield f"data: {self._beginning}\n\n".encode()
        raise httpx.ReadError("gone")


@pytest.mark.parametrize(("beginning", "ending"), [(RIGHT[0], Ending.LOST), (chunk("two"), Ending.WRONG)])
async def test_a_lost_connection_is_no_error_of_the_gateways(
    clients: Clients, beginning: str, ending: Ending
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"X-Request-Id": request.headers["x-request-id"]}
        return httpx.Response(200, stream=Broken(beginning), headers=headers)

    clients.http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(answer))
    case = Case({"stream": True}, answer_of(*RIGHT))
    assert (await clients.chat(random.Random(0), case, Manner.STREAMS)).ending is ending


class OverHttp(random.Random):
    """Dice that choose KServe over HTTP."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("status", "text", "number", "ending"),
    [
        (200, "two", None, Ending.ANSWERED),
        (200, "three", None, Ending.WRONG),
        (200, "two", "another's", Ending.WRONG),
        (503, None, None, Ending.REFUSED),
        (200, None, None, Ending.WRONG),
    ],
)
async def test_an_answer_of_kserve_is_the_right_one_or_an_error(
    clients: Clients, status: int, text: str | None, number: str | None, ending: Ending
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        own = number or json.loads(request.content)["id"]
        outputs = [{"name": "response", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]
        document = {"error": "away"} if text is None else {"id": own, "outputs": outputs}
        return httpx.Response(status, json=document)

    clients.http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(answer))
    result = await clients.infer(OverHttp(), KserveCase("one", b"two"), vanishes=False)
    assert (result.manner, result.ending) == (Manner.KSERVE_HTTP, ending)
