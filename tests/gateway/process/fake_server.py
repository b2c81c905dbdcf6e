"""The real server on the fake upstream, a process for tests of signals; its argument is settings as JSON.

The answer is one word every 50 ms, as many as the request's `max_tokens` or, of a legacy client, `max_token`.
"""

import json
import sys
from collections.abc import AsyncGenerator

from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.process.listeners import bind_gateway
from gateway.process.server import run
from gateway.settings import load_settings
from tests.gateway.fake_upstream import FakeUpstream, say


def slowly(request: Generation) -> AsyncGenerator[Event, None]:
    return say(*["word "] * (request.max_tokens or request.max_total_tokens or 2), gap_s=0.05)


def tell(url: str) -> None:
    print(url, flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    settings = load_settings({"workers": 1, **json.loads(sys.argv[1])})
    (listeners,) = bind_gateway(settings)
    sys.exit(run(settings, listeners=listeners, upstream=FakeUpstream(slowly), on_ready=tell))
