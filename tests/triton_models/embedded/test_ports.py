import socket

import pytest

from triton_models.embedded.errors import PortInUseError
from triton_models.embedded.ports import Ports, choose


def test_zero_becomes_a_free_port_and_a_number_stays() -> None:
    free = choose(Ports())
    assert 0 not in (free.http, free.grpc, free.metrics)
    assert len({free.http, free.grpc, free.metrics}) == 3
    assert choose(free) == free
    assert Ports(http=1, grpc=2).any_free
    assert not free.any_free


def test_a_port_with_a_listener_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"metrics port {port} is not available"):
            choose(Ports(metrics=port))


def test_a_port_asked_for_twice_is_refused() -> None:
    port = choose(Ports()).http
    with pytest.raises(PortInUseError, match=f"grpc port {port}"):
        choose(Ports(http=port, grpc=port))


def test_a_port_whose_connections_wait_for_their_end_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server's side closes first, and waits
            assert client.recv(1) == b""
    assert choose(Ports(http=port)).http == port
