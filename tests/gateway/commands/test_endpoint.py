import asyncio
import io
import json
from typing import Any

import pytest

from gateway.commands.endpoint import ClientError, events, fetch
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import MESSAGES, on_socket

CHAT = "/v1/chat/completions"


def streamed(url: str, **body: object) -> str:
    chunks = events(url, None, CHAT, {"model": "glm", "messages": MESSAGES, "stream": True, **body})
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_a_url_may_end_in_the_version(end: str) -> None:
    async with on_socket(FakeUpstream()) as served:
        url = str(served.http.base_url).rstrip("/") + end
        listed = await asyncio.to_thread(fetch, url, None, "/v1/models")
        assert [each["id"] for each in listed["data"]] == ["glm", "org/glm-2"]
        assert await asyncio.to_thread(streamed, url) == "Hello world"


async def test_a_refused_stream_is_an_error() -> None:
    async with on_socket(FakeUpstream()) as served:
        with pytest.raises(ClientError, match=r"temperature.*\(400\)"):
            await asyncio.to_thread(streamed, str(served.http.base_url), temperature=9)


@pytest.mark.parametrize(
    ("chunk", "told"),
    [
        ({"error": {"message": "full"}}, "full"),
        ({"error": "full"}, "full"),
        ({"error": {"code": 7}}, "{'code': 7}"),
        ({"error": None, "choices": []}, "the answer broke off"),
    ],
)
def test_the_errors_of_other_endpoints_are_told(
    chunk: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Streamed(io.BytesIO):
        status = 200

    sent = Streamed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    monkeypatch.setattr("gateway.commands.endpoint._response", lambda *_: sent)
    with pytest.raises(ClientError) as ended:
        list(events("http://endpoint", None, CHAT, {}))
    assert str(ended.value) == told


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (None, "the gateway needs a key: --key KEY, or the variable TRITONGATE_KEY"),
        ("wrong", "the gateway does not know this key (--key, TRITONGATE_KEY)"),
    ],
)
async def test_how_to_give_a_key_is_said(key: str | None, told: str) -> None:
    async with on_socket(FakeUpstream(), api_keys=[{"name": "a", "key": "right"}]) as served:
        url = str(served.http.base_url)
        for ask in (
            lambda: fetch(url, key, "/v1/models"),
            lambda: list(events(url, key, CHAT, {"model": "glm", "messages": MESSAGES})),
        ):
            with pytest.raises(ClientError) as refused:
                await asyncio.to_thread(ask)
            assert str(refused.value) == told
