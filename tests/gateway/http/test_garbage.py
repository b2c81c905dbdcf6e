"""What a request held is freed when it is over, not when the garbage collector next looks at everything."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.http.record import RequestRecord
from gateway.http.run import RunningRequest
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, Served, on_socket, until


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
async def test_an_ended_request_is_freed_at_once(
    parameters: dict[str, Any] | None, living: Callable[..., int]
) -> None:
    async with on_socket(FakeUpstream(lambda _: say("a", "b", "c", gap_s=0.05))) as served:
        for _ in range(3):
            if parameters is None:
                await leave(served)
            else:
                await served.chat(**parameters)
        await served.until_idle()
        # A connection keeps its last request until it has another one.
        await served.http.get("/version")
        await until(lambda: living(RunningRequest) == 0 and living(RequestRecord) <= 1)
