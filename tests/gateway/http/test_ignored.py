"""The answer names the fields of its request that had no effect."""

import logging
from collections.abc import AsyncIterator

import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import Served, in_process

HEADER = "x-tritongate-ignored"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with in_process(FakeUpstream()) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_names_them(served: Served, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gateway.access"):
        answer = await served.chat(stream=stream, reasoning_effort="low", verbosity="low")
        plain = await served.chat(stream=stream)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "verbosity, reasoning_effort")
    assert HEADER not in plain.headers
    lines = [record for record in caplog.records if record.name == "gateway.access"]
    assert [getattr(line, "ignored", None) for line in lines] == ["verbosity,reasoning_effort", None]


async def test_a_refusal_has_it_too(served: Served) -> None:
    refused = await served.chat(verbosity="low", temperature=9)
    assert (refused.status_code, refused.headers.get(HEADER)) == (400, "verbosity")


async def test_a_strict_gateway_refuses_them() -> None:
    async with in_process(FakeUpstream(), strict=True) as served:
        assert await served.refusal(verbosity="low") == (400, "verbosity", None)
        assert (await served.chat()).status_code == 200


async def test_the_model_may_be_left_out_where_one_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = served.upstream.model("glm")
    monkeypatch.setattr(served.upstream, "models", lambda: [card])
    answer = await served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
    )
    assert (answer.status_code, answer.json()["model"]) == (200, "glm")
