"""What a request held is freed when it is over, not when the garbage collector next looks at everything."""

import gc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.triton.inbox import Inbox
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, Served, on_socket, until
from tests.gateway.triton.asking import begun
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton

pytest_plugins = ["tests.gateway.triton.conftest"]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def living(*kinds: type) -> list[Any]:
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


async def leave(served: Served) -> None:
    """Hang up while the answer comes."""
    async with httpx.AsyncClient(base_url=served.http.base_url) as http:
        body = {"model": "glm", "messages": MESSAGES, "stream": True}
        async with http.stream("POST", CHAT, json=body) as answer:
            async for _ in answer.aiter_bytes():
                return


@pytest.mark.parametrize(
    "parameters",
    [{}, {"stream": True}, {"temperature": 99}, {"model": "none"}, {"stream": True, "n": 3}, None],
    ids=["whole", "streamed", "invalid", "unknown", "choices", "left"],
)
async def test_an_ended_request_is_freed_at_once(parameters: dict[str, Any] | None) -> None:
    async with on_socket(FakeUpstream(lambda _: say("a", "b", "c", gap_s=0.05))) as served:
        for _ in range(3):
            if parameters is None:
                await leave(served)
            else:
                await served.chat(**parameters)
        await served.until_idle()
        # A connection keeps its last request until it has another one.
        await served.http.get("/version")
        await until(lambda: not living(Flight) and len(living(Exchange)) <= 1)


async def test_an_answer_that_was_given_up_is_freed_at_once(
    triton: FakeTriton, fake: FakeChannels, serve: Any
) -> None:
    events = await begun(await serve(triton), fake)
    fake.frame((0, "He"))
    await anext(events)
    assert living(Inbox)
    await events.aclose()
    del events
    await until(lambda: not living(Inbox))
