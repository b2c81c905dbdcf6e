"""JSON lists of a million items, written in pieces so that other requests are served in between."""

import asyncio
from collections.abc import Iterable
from itertools import islice

from msgspec import Raw

from gateway.openai.answer import encode

_PIECE = 4096
"""Items per piece: a few milliseconds' work, when each has to be decoded from its own bytes."""


async def long_list(items: Iterable[int] | Iterable[str]) -> Raw:
    """Return `items`, which are read piece by piece, as a JSON list.

    Raises:
        GatewayError: reading an item failed.
    """
    left = iter(items)
    pieces = []
    while piece := list(islice(left, _PIECE)):
        pieces.append(encode(piece)[1:-1])
        await asyncio.sleep(0)
    return Raw(b"[" + b",".join(pieces) + b"]")
