"""The `history` document: a JSON list of role objects, oldest first, the same for all chat formats."""

from typing import Any, Literal

import msgspec

from wire.decoding import decode_bounded

Role = Literal["system", "user", "assistant", "observation"]


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One past message.

    `metadata` is the tool's name in an assistant turn that calls a tool, else empty. `tools` is only for a
    system turn: plain `{name, description, parameters}` objects, written into the prompt as JSON.
    """

    role: Role
    content: str
    metadata: str = ""
    tools: list[dict[str, Any]] | None = None


_decoder = msgspec.json.Decoder(list[Turn])


def decode_history(document: bytes) -> list[Turn]:
    """Read the `history` tensor; empty bytes are an empty history.

    Raises:
        msgspec.ValidationError: not a list of role objects, an unknown key, or nested too deeply.
        msgspec.DecodeError: not JSON.
    """
    return decode_bounded(_decoder, document) if document else []


def encode_history(turns: list[Turn]) -> bytes:
    """Write the `history` tensor."""
    return msgspec.json.encode(turns)
