import asyncio
import json

from bench.overload import OverloadRow, _flood, judge
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


def row(**values: float) -> OverloadRow:
    return OverloadRow(**dict.fromkeys(OverloadRow.__slots__, 0) | values)


def test_each_promise_is_judged_by_its_own_figure() -> None:
    full = row(served_p99=1000.0)
    kept = {"served_p99": 1500.0, "refused_p50": 300.0, "mib_before": 100.0, "mib_after": 132.0}
    assert [each.holds for each in judge(full, row(**kept))] == ["yes"] * 3
    for number, broken in enumerate(({"served_p99": 1501.0}, {"refused_p50": 301.0}, {"mib_after": 133.0})):
        assert [each.holds for each in judge(full, row(**kept | broken))].index("NO") == number
