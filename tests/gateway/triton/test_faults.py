import asyncio
import logging
import socket
from typing import Any

import pytest

from gateway.app import create_app
from gateway.triton import faults
from gateway.triton.client import Client
from gateway.triton.faults import FAULTS, FIRST_WITHOUT, published_faults, warn_of_faults
from tests.gateway.serving import settings, until
from tests.gateway.triton.fake_triton import FakeTriton
from tests.ports import free_ports


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.51.0", len(FAULTS)),
        ("2.59.0", len(FAULTS)),
        ("2.59.1", 2),
        ("2.66.0", 2),
        ("2.67.0", 1),
        ("2.70.0", 1),
        ("2.71.0", 0),
        ("2.71.0dev", 0),
        ("3.0.0", 0),
        ("", 0),
    ],
)
def test_each_version_has_the_faults_that_were_fixed_after_it(version: str, told: int) -> None:
    text = published_faults(version)
    assert sum(fault in (text or "") for _, fault in FAULTS) == told
    assert (text is None) == (told == 0)
    assert text is None or (version in text and FIRST_WITHOUT in text)


def test_the_last_fix_is_in_the_first_version_without() -> None:
    assert published_faults("2.71.0") is None
    assert max(fixed for fixed, _ in FAULTS) == (2, 71, 0)


@pytest.mark.parametrize("version", ["2.51.0", "2.71.0"])
async def test_a_gateway_warns_once_it_reaches_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(faults, "_RETRY_S", 0.05)
    (port,) = free_ports(1)
    client = Client(f"127.0.0.1:{port}")
    warning = asyncio.create_task(warn_of_faults(client))
    await asyncio.sleep(0.1)
    triton = FakeTriton()
    triton.port = port
    triton.version = version
    await triton.start()
    await warning
    await client.close()
    await triton.stop()
    told: list[Any] = [record for record in caplog.records if "published faults" in record.getMessage()]
    assert [record.upstream for record in told] == [triton.address] * (version == "2.51.0")


async def test_a_gateway_warns_of_another_in_the_place_of_a_triton(
    caplog: pytest.LogCaptureFixture, triton: FakeTriton
) -> None:
    triton.name = "tritongate"
    client = Client(triton.address)
    await warn_of_faults(client)
    await client.close()
    assert caplog.messages == ["a tritongate gateway is there, not a Triton: its models are not served"]


async def test_one_that_hangs_is_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was never warned of: a call that gets no answer ends by its deadline."""
    monkeypatch.setattr(faults, "_RETRY_S", 0.05)
    triton = FakeTriton()
    (triton.port,) = free_ports(1)
    triton.version = "2.51.0"
    hanging = socket.create_server(("127.0.0.1", triton.port))  # nobody accepts, nor answers
    client = Client(f"127.0.0.1:{triton.port}", timeout_s=0.2)
    warning = asyncio.create_task(warn_of_faults(client))
    await asyncio.sleep(0.6)
    hanging.close()
    await triton.start()
    await asyncio.wait({warning}, timeout=60)
    await client.close()
    await triton.stop()
    assert "published faults" in caplog.text


@pytest.mark.parametrize("warns", [True, False])
async def test_the_setting(caplog: pytest.LogCaptureFixture, triton: Any, *, warns: bool) -> None:
    caplog.set_level(logging.WARNING)
    triton.version = "2.51.0"
    app = create_app(settings(upstreams=[triton.address], warn_of_faults=warns))
    async with app.router.lifespan_context(app):
        await until(app.state.gateway.ready)
        await asyncio.sleep(0.2)
    assert ("published faults" in caplog.text) == warns
