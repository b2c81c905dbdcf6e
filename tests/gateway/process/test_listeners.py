import contextlib
import select
import socket

import pytest

from gateway.errors import ListenError
from gateway.process.listeners import Listeners, base_url, bind, bind_gateway, claim, listen_gateway
from tests.gateway.serving import settings
from tests.ports import free_ports


def bind_all(stack: contextlib.ExitStack, host: str, port: int, count: int) -> list[Listeners]:
    """Bind one port for HTTP."""
    listeners = bind_gateway(settings(host=host, port=port, workers=count))
    for each in listeners:
        stack.callback(each.close)
    return listeners


def test_metrics_have_an_address_of_their_own() -> None:
    (port,) = free_ports(1)
    for count in (1, 2):
        listeners = bind_gateway(settings(metrics_address=f"127.0.0.1:{port}", workers=count))
        assert [each.http[-1].getsockname() for each in listeners] == [("127.0.0.1", port)] * count
        for each in listeners:
            each.close()


def test_a_taken_port_is_told() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ListenError, match="Address already in use"):
            bind("127.0.0.1", first.getsockname()[1])


def test_a_start_holds_its_address_before_it_listens() -> None:
    with bind("127.0.0.1", 0) as first:
        host, port = first.getsockname()
        with claim(first), bind(host, port) as second, pytest.raises(ListenError, match="is starting there"):
            claim(second)
        claim(first).close()


def test_an_address_of_nobody() -> None:
    with pytest.raises(ListenError, match="cannot listen on"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")],  # noqa: S104
)
def test_base_url(host: str, url: str) -> None:
    with bind(host, 0) as listener:
        assert base_url(listener) == f"{url}{listener.getsockname()[1]}"


def test_an_ipv6_address_may_be_written_as_in_a_url() -> None:
    with bind("[::1]", 0) as listener:
        assert base_url(listener).startswith("http://[::1]:")


def test_an_address_for_several_sockets_is_parted_among_those_that_listen() -> None:
    with contextlib.ExitStack() as stack:
        listeners = [each.http[0] for each in bind_all(stack, "127.0.0.1", 0, 3)]
        assert len({each.getsockname() for each in listeners}) == 1
        for each in listeners[1:]:
            each.listen(64)
        clients = [
            stack.enter_context(socket.create_connection(listeners[0].getsockname(), 10)) for _ in range(40)
        ]
        accepted = dict.fromkeys(listeners[1:], 0)
        for _ in clients:
            # A client may be connected a moment before its listener knows.
            ready, _, _ = select.select(listeners[1:], [], [], 60)
            stack.enter_context(ready[0].accept()[0])
            accepted[ready[0]] += 1
    assert min(accepted.values()) > 0


@pytest.mark.parametrize("others", [1, 2], ids=["alone", "shared"])
def test_an_address_is_never_shared_with_a_stranger(others: int) -> None:
    with contextlib.ExitStack() as stack:
        for each in bind_all(stack, "127.0.0.1", 0, others):
            each.http[0].listen()
            host, port = each.http[0].getsockname()
        with pytest.raises(ListenError, match="Address already in use"):
            bind_all(stack, host, port, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_comes_second_to_a_bound_address_may_not_listen(host: str) -> None:
    with contextlib.ExitStack() as stack:
        first = bind_all(stack, host, 0, 2)
        second = bind_all(stack, host, first[0].http[0].getsockname()[1], 2)
        listen_gateway(first)
        with pytest.raises(ListenError, match="Address already in use"):
            listen_gateway(second)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_gateway_has_several_addresses(count: int, host: str) -> None:
    listeners = bind_gateway(settings(host=host, kserve_http_port=0, kserve_grpc_port=0, workers=count))
    with contextlib.ExitStack() as stack:
        for each in listeners:
            stack.callback(each.close)
        assert len(listeners) == count
        assert len({tuple(each.getsockname() for each in own.http) for own in listeners}) == 1
        assert len({own.grpc for own in listeners}) == 1
        assert len({each.getsockname()[1] for each in listeners[0].http}) == 2
        assert listeners[0].grpc is not None
        assert listeners[0].grpc.startswith(host + ":")
        assert [own.reserved is None for own in listeners] == [False, True][:count]
        listen_gateway(listeners)
        for own in listeners:
            socket.create_connection(own.http[1].getsockname()[:2], 10).close()


@pytest.mark.parametrize("grpc", [False, True])
def test_a_gateway_gives_everything_back_if_one_address_is_taken(grpc: bool) -> None:
    with bind("127.0.0.1", 0) as taken, bind("127.0.0.1", 0) as free:
        taken.listen()
        port, other = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        second = {"kserve_grpc_port" if grpc else "kserve_http_port": port}
        with pytest.raises(ListenError, match=f"port {port}: Address already in use"):
            bind_gateway(settings(port=other, **second, workers=1))
        bind("127.0.0.1", other).close()


def test_who_comes_second_to_the_address_of_grpc_may_not_listen() -> None:
    (first,) = bind_gateway(settings(kserve_grpc_port=0, workers=1))
    assert first.reserved is not None
    port = first.reserved.getsockname()[1]
    (second,) = bind_gateway(settings(kserve_grpc_port=port, workers=1))
    with socket.socket() as other:  # as gRPC does
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ListenError, match="Address already in use"):
            listen_gateway([second])
    first.close()
    second.close()
