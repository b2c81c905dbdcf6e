import contextlib
import socket
from collections.abc import Iterator

import pytest

from triton_models.embedded.client import TritonClient
from triton_models.embedded.errors import ModelError


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A listener whose connections the kernel accepts, and nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def test_a_slow_connection_has_as_long_as_its_call(silent: socket.socket) -> None:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    async with contextlib.aclosing(TritonClient(address)) as client:
        with pytest.raises(ModelError, match="Deadline Exceeded"):
            await client.unload("any", 0.7)


async def test_a_server_that_is_gone_is_known_at_once(silent: socket.socket) -> None:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    silent.close()
    async with contextlib.aclosing(TritonClient(address)) as client:
        with pytest.raises(ModelError, match="refused"):
            await client.unload("any", 30)
