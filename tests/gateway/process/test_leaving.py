"""A process whose place another one has taken: what becomes of its connections."""

import asyncio
import time
from typing import Any

import pytest

from gateway.kserve.grpc import GrpcServer
from gateway.process import server
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import on_socket, until


async def test_idle_connections_are_closed_and_the_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_WHEN_LEAVING_S", 1)
    async with on_socket(FakeUpstream(lambda _: say(*"abcdefgh", gap_s=0.3))) as served:
        assert isinstance(served.server, server.Server)
        assert served.server.config.timeout_keep_alive > 60, "load balancers keep theirs for so long"
        app: Any = served.server.config.app
        asked = asyncio.create_task(served.chat())
        await until(lambda: bool(served.upstream.requests))
        assert (await served.http.get("/health")).status_code == 200
        assert app.state.connections.open == 2
        grpc_server = GrpcServer(app.state.door, app.state.records, None)
        before = time.monotonic()
        await server._leave(app, served.server, grpc_server, drain_s=60)
        assert time.monotonic() - before < 50
        assert (await asked).status_code == 200
        assert app.state.connections.open == 0
