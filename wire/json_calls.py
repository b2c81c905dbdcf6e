"""How GLM-4 writes a tool call: the arguments as a JSON object, after a line with the tool's name."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from wire.decoding import decode_bounded

_decoder = msgspec.json.Decoder(dict[str, Any])


def read_call(content: str) -> dict[str, Any] | None:
    """Return the arguments of the call in `content`; None if it is not a call."""
    try:
        arguments = decode_bounded(_decoder, content.encode())
        json.dumps(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return arguments


def write_call(arguments: Mapping[str, Any]) -> str:
    """Return `arguments`, which are JSON values, as a JSON object."""
    return json.dumps(dict(arguments), ensure_ascii=False)
