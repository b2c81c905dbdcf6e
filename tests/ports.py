"""Ports for the processes that tests start: never the same for two workers that run side by side.

A port is free when it is given, and is bound a second later by a process that takes long to start. Whatever
asks the kernel for any free port meanwhile, each new connection included, must not get the same one: so these
are below the range that Linux gives out by itself, and each worker has a share of its own.
"""

import itertools
import os
import socket

_FIRST, _SHARE = 12_000, 2_500
"""Of at most 8 workers; Linux's own range begins at 32768 (`net.ipv4.ip_local_port_range`)."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_begin = os.getpid() * 10 % _SHARE  # where a second run of the tests on this machine hardly begins, too
_ports = itertools.cycle(_FIRST + _worker * _SHARE + (_begin + each) % _SHARE for each in range(_SHARE))


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody has, and that this run does not give out again soon."""
    found: list[int] = []
    while len(found) < count:
        port = next(_ports)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
        found.append(port)
    return found
