import socket
from collections.abc import Iterator

import pytest

from triton_models.embedded.client import CallError, TritonClient


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A listener whose connections the kernel accepts, and nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_slow_connection_has_as_long_as_its_call(silent: socket.socket) -> None:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with TritonClient(address) as client, pytest.raises(CallError) as caught:
        client.state("any", 0.7)
    assert caught.value.timed_out
    assert not caught.value.by_server


def test_a_server_that_is_gone_is_known_at_once(silent: socket.socket) -> None:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    silent.close()
    with TritonClient(address) as client, pytest.raises(CallError, match="refused") as caught:
        client.state("any", 30)
    assert not caught.value.timed_out
    assert not caught.value.by_server
