"""One of several processes of a gateway: `python -m gateway.worker`, started only by `gateway.workers`.

It reads an order, one line of JSON, from standard input. When standard input ends, because the parent died or
closed it, the worker stops as on SIGTERM. It writes one line to standard output when every model is ready.
"""

import os
import shutil
import signal
import socket
import sys
import threading
from typing import Any

import msgspec
from pydantic import SecretStr

from gateway.configuration import restore_settings
from gateway.fleet import Place
from gateway.listeners import BACKLOG, Listeners
from gateway.server import run
from gateway.setting_types import revealed
from gateway.settings import Settings


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker, its listeners, and its place among the workers."""

    settings: dict[str, Any]
    """All settings, secrets in clear text: never log them or put them on a command line."""
    http: list[int]
    """The inherited descriptors of the sockets for HTTP."""
    grpc: str | None
    """The address for gRPC, if there is one."""
    place: Place


_decoder = msgspec.json.Decoder(Order, dec_hook=lambda kind, text: kind(text))  # of the place's path


def encode_order(settings: Settings, listeners: Listeners, place: Place) -> bytes:
    """Return an order as the line that the worker reads."""
    http = [listener.fileno() for listener in listeners.http]
    order = Order(settings=settings.model_dump(), http=http, grpc=listeners.grpc, place=place)
    return msgspec.json.encode(order, enc_hook=_plain) + b"\n"


def decode_order(line: bytes) -> Order:
    """Read what `encode_order` wrote.

    Raises:
        msgspec.MsgspecError: it is not an order.
    """
    return _decoder.decode(line)


def main() -> int:
    """Carry out the order on standard input; return the exit status of `gateway.server.run`."""
    order = decode_order(sys.stdin.buffer.readline())
    orphaned = threading.Event()
    threading.Thread(target=_end_with_input, args=(orphaned,), name="parent", daemon=True).start()
    listeners = Listeners(
        http=tuple(socket.socket(fileno=descriptor) for descriptor in order.http), grpc=order.grpc
    )
    for listener in listeners.http:
        listener.listen(BACKLOG)  # again, if the end of the worker before has shut it down
    status = run(
        restore_settings(order.settings),
        listeners=listeners,
        on_ready=lambda _url: print("ready", flush=True),  # noqa: T201 - read by the parent
        place=order.place,
    )
    if orphaned.is_set():  # else the parent removes it
        shutil.rmtree(order.place.folder, ignore_errors=True)
    return status


def _end_with_input(orphaned: threading.Event) -> None:
    # Not by `sys.stdin`, whose lock an interpreter that ends needs: it aborts if a thread is still reading.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _plain(value: object) -> Any:
    if isinstance(value, SecretStr):
        return revealed(value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
