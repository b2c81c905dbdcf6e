import asyncio
import json

from bench.overload import _flood
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import MESSAGES, on_socket


async def test_answers_refusals_and_health_are_told_apart() -> None:
    upstream = FakeUpstream(lambda _: say("a", gap_s=0.1))
    body = json.dumps({"model": "glm", "messages": MESSAGES}).encode()
    async with on_socket(upstream, max_in_flight=1, max_waiting=1) as served:
        seen = await asyncio.wait_for(_flood(str(served.http.base_url), body, 6, 0.5), 60)
        assert len(seen.served) == len(upstream.requests) > 0
        assert seen.refused
        assert seen.health
        assert not seen.failed
