import asyncio
import logging
from typing import Any

import pytest

from gateway.http.record import Gateway
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, MESSAGES, in_process


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("caf\xe9", False),
        ("", False),
    ],
)
async def test_request_ids(given: str, kept: bool) -> None:
    async with in_process(FakeUpstream()) as served:
        headers = {"x-request-id": given.encode("latin-1")}
        answer = await served.http.post(CHAT, json={"model": "glm", "messages": MESSAGES}, headers=headers)
        returned = answer.headers["x-request-id"]
        assert (returned == given) is kept
        assert returned.isascii()
        assert served.upstream.requests[0].request_id == returned


async def test_request_ids_on_every_answer() -> None:
    async with in_process(FakeUpstream()) as served:
        answers = [await served.http.get(path) for path in ("/health", "/nope", "/v1/models")]
        assert len({answer.headers["x-request-id"] for answer in answers}) == 3


async def test_the_access_log_has_counts_and_no_content(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = [{"name": "anna", "key": "sk-very-secret"}]
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        body = {"model": "glm", "messages": [{"role": "user", "content": "my prompt"}]}
        bearer = {"authorization": "Bearer sk-very-secret", "x-request-id": "r1"}
        await served.http.post(CHAT, json=body, headers=bearer)
        await served.http.post(CHAT, json=body, headers={"authorization": "Bearer sk-guess"})
    records: list[Any] = [record for record in caplog.records if record.name == "gateway.access"]
    first, second = records
    assert (first.request_id, first.key, first.model, first.status) == ("r1", "anna", "glm", 200)
    assert (first.prompt_tokens, first.generated_tokens, first.route) == (3, 3, CHAT)
    assert (second.status, second.error) == (401, "AuthenticationError")
    everything = " ".join(
        str(vars(record)) for record in caplog.records if not record.name.startswith("httpx")
    )
    assert not [text for text in ("my prompt", "Hello", "very-secret", "guess") if text in everything]


async def test_an_unforeseen_failure_is_a_clean_500(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = FakeUpstream()
    monkeypatch.setattr(upstream, "models", None)
    async with in_process(upstream) as served:
        answer = await served.http.get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "NoneType" not in answer.text
    assert "NoneType" in caplog.text


async def test_routes_are_labelled_by_their_template() -> None:
    async with in_process(FakeUpstream()) as served:
        for path in ("/v1/models/a", "/v1/models/b/c", "/wp-admin", "/x"):
            await served.http.get(path)
        await served.chat(model="made-up")
        assert (
            served.metric("requests_total", route="/v1/models/{model_id:path}", model="unknown", status="404")
            == 2
        )
        assert served.metric("requests_total", route="unknown", model="unknown", status="404") == 2
        assert served.metric("requests_total", route=CHAT, model="unknown", status="404") == 1


async def test_while_draining_only_the_operators_paths_answer() -> None:
    async with in_process(FakeUpstream()) as served:
        served.gateway.drain.begin()
        answer = await served.chat()
        assert answer.status_code == 503
        assert answer.headers["connection"] == "close"
        assert answer.headers["retry-after"] == "1"
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/health/ready")).status_code == 503
        assert (await served.http.get("/metrics")).status_code == 200
        assert served.metric("requests_rejected_total", model="unknown", reason="draining") == 1


async def test_a_scrape_that_outlasts_the_drain_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came after the last request's end: uvicorn ends it, while another process does not answer it."""
    waiting = asyncio.Event()

    async def exposition(_: Gateway) -> bytes:
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Gateway, "exposition", exposition)
    async with in_process(FakeUpstream()) as served:
        served.gateway.drain.begin()
        scrape = asyncio.create_task(served.http.get("/metrics"))
        await waiting.wait()
        scrape.cancel()
        assert (await scrape).status_code == 503
