"""One of several processes of a gateway: `python -m gateway.worker`, which only `gateway.workers` runs.

Standard input brings an order, one line of JSON; when it ends, as it does with the parent, that is a SIGTERM.
A line on standard output says that every model is ready.
"""

import os
import signal
import socket
import sys
import threading
from typing import Any

import msgspec
from pydantic import SecretStr

from gateway.configuration import load_settings
from gateway.fleet import Place
from gateway.server import run
from gateway.setting_types import revealed
from gateway.settings import Settings


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, where, and beside whom."""

    settings: dict[str, Any]
    """Every one that has a value, secrets in clear: nothing to be logged, nor put on a command line."""
    listener: int
    """Descriptor of the socket, inherited."""
    place: Place


_decoder = msgspec.json.Decoder(Order, dec_hook=lambda kind, text: kind(text))  # of the place's path


def encode_order(settings: Settings, listener: int, place: Place) -> bytes:
    """Return an order as the line that its process reads."""
    given = {name: value for name, value in settings.model_dump().items() if value is not None}
    order = Order(settings=given, listener=listener, place=place)
    return msgspec.json.encode(order, enc_hook=_plain) + b"\n"


def decode_order(line: bytes) -> Order:
    """Read what `encode_order` wrote.

    Raises:
        msgspec.MsgspecError: it is no order.
    """
    return _decoder.decode(line)


def main() -> int:
    """Carry out the order on standard input; return the exit status, as of `gateway.server.run`."""
    order = decode_order(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, name="parent", daemon=True).start()
    return run(
        # As flags, they go before whatever environment and files say.
        load_settings(order.settings),
        listener=socket.socket(fileno=order.listener),
        on_ready=lambda _url: print("ready", flush=True),  # noqa: T201 - read by the parent
        place=order.place,
    )


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _plain(value: object) -> Any:
    if isinstance(value, SecretStr):
        return revealed(value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
