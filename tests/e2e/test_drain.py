"""A gateway that is told to end while an answer of the real Triton is on its way."""

import contextlib
import json
import signal

import httpx
import pytest

from tests.e2e.relay import Relay
from tests.e2e.serve_process import ServeProcess
from tests.e2e.test_edges import CHAT, LONG
from tests.e2e.up_process import wait_until

pytestmark = pytest.mark.e2e


def test_a_gateway_that_is_told_to_end_lets_streams_finish_and_takes_nothing_new(relay: Relay) -> None:
    with contextlib.ExitStack() as stack:
        gateway = ServeProcess(relay.address, "--models", "chatglm3", TRITONGATE_DRAIN_S="100")
        own = stack.enter_context(gateway)
        # Connections of before: the listening socket may close at once.
        reader, prober, late = (
            stack.enter_context(httpx.Client(base_url=own.base_url, timeout=60)) for _ in range(3)
        )
        assert [each.get("/health").status_code for each in (prober, late)] == [200, 200]
        asked = {**LONG, "max_tokens": 4000}
        events = stack.enter_context(reader.stream("POST", CHAT, json=asked)).iter_lines()
        next(events)
        with relay.held():
            own.process.send_signal(signal.SIGTERM)
            wait_until(lambda: prober.get("/health/ready").status_code == 503)
            refused = late.post(CHAT, json=asked)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        assert json.loads(data[-1])["choices"][0]["finish_reason"] == "length"
        assert own.process.wait(30) == 0
