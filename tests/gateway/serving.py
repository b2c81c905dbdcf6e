"""A gateway on the fake upstream: in process, or on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from gateway.app import create_app
from gateway.http.record import Gateway
from gateway.process.listeners import base_url, bind
from gateway.process.server import make_server
from gateway.settings import Settings, load_settings
from tests.gateway.fake_upstream import FakeUpstream

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def settings(**values: Any) -> Settings:
    return load_settings({"port": 0, **values})


async def until(condition: Callable[..., bool]) -> None:  # called with nothing: a loop's value is its default
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@dataclass
class Served:
    """A running gateway, what is behind it, and clients for it."""

    gateway: Gateway
    upstream: FakeUpstream
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI | None = None
    server: uvicorn.Server | None = None

    async def chat(self, **parameters: Any) -> httpx.Response:
        body = {"model": "glm", "messages": MESSAGES, **parameters}
        return await self.http.post(CHAT, json=body)

    async def refusal(self, **parameters: Any) -> tuple[int, Any, Any]:
        """Status, `param` and `code` of a request that must fail."""
        answer = await self.chat(**parameters)
        assert set(answer.json()) == {"error"}
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return answer.status_code, error["param"], error["code"]

    def metric(self, name: str, **labels: str) -> float:
        value = self.gateway.metrics.registry.get_sample_value("tritongate_" + name, labels)
        return 0.0 if value is None else value

    async def hang_up(self, asking: Coroutine[Any, Any, Any], *, tokens: int = 0) -> None:
        """Ask, leave once the upstream is at work and has said so much, and wait until that is noticed."""

        def generated() -> float:
            return self.metric("generated_tokens_total", model="glm")

        task = asyncio.create_task(asking)
        await until(lambda: self.upstream.running == 1 and generated() >= tokens)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: self.upstream.running == 0)

    async def until_idle(self) -> None:
        """Wait until nothing is left of any request."""
        await until(
            lambda: (
                not (
                    self.upstream.running
                    or self.gateway.admission.in_flight
                    or self.gateway.admission.waiting
                )
                and self.metric("requests_in_flight", model="glm") == 0
                and self.metric("requests_waiting", model="glm") == 0
            )
        )


@asynccontextmanager
async def in_process(upstream: FakeUpstream, **values: Any) -> AsyncIterator[Served]:
    upstream.settings = settings(**values)
    app = create_app(upstream.settings, upstream)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        yield Served(app.state.gateway, upstream, http)


@asynccontextmanager
async def on_socket(upstream: FakeUpstream, *, key: str = "unused", **values: Any) -> AsyncIterator[Served]:
    upstream.settings = settings(**values)
    app = create_app(upstream.settings, upstream)
    listener = bind("127.0.0.1", 0)
    url = base_url(listener)
    server = make_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.up.wait()
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as sdk,
        ):
            yield Served(app.state.gateway, upstream, http, sdk, server)
    finally:
        server.should_exit = True
        await serving
