import asyncio
from importlib.metadata import version

import pytest

from gateway.limits.admission import Pacing
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import in_process


async def test_readiness_follows_the_models() -> None:
    upstream = FakeUpstream()
    async with in_process(upstream) as served:
        assert (await served.http.get("/health/ready")).json()["models"] == ["glm", "org/glm-2"]
        upstream.ready = False
        answer = await served.http.get("/health/ready")
        assert answer.status_code == 503
        assert "glm" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        assert (await served.http.get("/health")).status_code == 200


async def test_load_balancers_may_ask_with_head() -> None:
    async with in_process(FakeUpstream()) as served:
        for path in ("/health", "/health/ready"):
            answer = await served.http.head(path)
            assert answer.status_code == 200
            assert answer.content == b""


async def test_an_unloaded_model_does_not_count() -> None:
    upstream = FakeUpstream()
    upstream.unloaded.add("glm")
    async with in_process(upstream) as served:
        answer = await served.http.get("/health/ready")
        assert (answer.status_code, answer.json()["models"]) == (200, ["org/glm-2"])
        upstream.ready = False
        answer = await served.http.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "Not ready: org/glm-2."
        upstream.unloaded.add("org/glm-2")
        assert (await served.http.get("/health/ready")).json()["models"] == []


async def test_no_model_is_not_ready() -> None:
    async with in_process(FakeUpstream(models=())) as served:
        answer = await served.http.get("/health/ready")
        assert served.metric("models") == 0
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert all(reason in message for reason in ("no Triton answers", "none has one", "repository_key"))


async def test_version() -> None:
    async with in_process(FakeUpstream()) as served:
        assert (await served.http.get("/version")).json() == {"version": version("tritongate")}


async def test_metrics_are_exposed() -> None:
    async with in_process(FakeUpstream()) as served:
        await served.chat()
        answer = await served.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert 'tritongate_generated_tokens_total{model="glm"} 3.0' in answer.text


async def test_no_burst_is_in_front_of_health_metrics_and_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async def enter(_: Pacing) -> None:
        await asyncio.Event().wait()  # as behind a burst that never ends

    monkeypatch.setattr(Pacing, "enter", enter)
    async with in_process(FakeUpstream()) as served:
        asked = asyncio.create_task(served.chat())
        async with asyncio.timeout(20):
            for path in ("/health", "/health/ready", "/metrics", "/version", "/", "/v2/health/ready"):
                assert (await served.http.get(path)).status_code == 200
            assert (await served.http.head("/health")).status_code == 200
        assert not asked.done()
        asked.cancel()
        await asyncio.wait({asked})
