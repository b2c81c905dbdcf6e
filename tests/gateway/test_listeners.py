import contextlib
import select
import socket

import pytest

from gateway.listeners import ListenError, base_url, bind, bind_all, listen_all


def test_a_taken_port_is_told() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ListenError, match="Address already in use"):
            bind("127.0.0.1", first.getsockname()[1])


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
        listeners = [stack.enter_context(each) for each in bind_all("127.0.0.1", 0, 3)]
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
        for each in bind_all("127.0.0.1", 0, others):
            stack.enter_context(each).listen()
            address = each.getsockname()
        with pytest.raises(ListenError, match="Address already in use"):
            bind_all(*address, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_comes_second_to_a_bound_address_may_not_listen(host: str) -> None:
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(each) for each in bind_all(host, 0, 2)]
        second = [stack.enter_context(each) for each in bind_all(*first[0].getsockname()[:2], 2)]
        listen_all(first)
        with pytest.raises(ListenError, match="Address already in use"):
            listen_all(second)
