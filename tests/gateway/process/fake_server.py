"""The real server on the fake upstream, a process for tests of signals; its argument is settings as JSON.

The answer is one word every 50 ms, as many as the request's `max_tokens` or, of a legacy client, `max_token`.
An unload says so, and never ends.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator

from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.core.upstream import EntriesChanged
from gateway.process.listeners import bind_gateway
from gateway.process.server import run
from gateway.settings import load_settings
from tests.gateway.fake_upstream import FakeUpstream, say


def slowly(request: Generation) -> AsyncGenerator[Event, None]:
    return say(*["word "] * (request.max_tokens or request.max_total_tokens or 2), gap_s=0.05)


def tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the test reads it


class NeverUnloading(FakeUpstream):
    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        tell(f"unloading {model_id}")
        await asyncio.Event().wait()
        return []


if __name__ == "__main__":
    settings = load_settings({"workers": 1, **json.loads(sys.argv[1])})
    (listeners,) = bind_gateway(settings)
    sys.exit(run(settings, listeners=listeners, upstream=NeverUnloading(slowly), on_ready=tell))
