import socket

from tests.ports import free_ports


def test_no_port_is_given_twice_or_taken() -> None:
    first = free_ports(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first[-1] + 1))
        taken.listen()
        second = free_ports(3)
    assert not {*first, first[-1] + 1} & set(second)
    assert max(first) < 32768
