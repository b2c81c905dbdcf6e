"""Errors of an entry, as text that both people and the gateway can read.

Triton transmits an error as a status and a message, on a stream often as the message alone. So the message
begins with a code: ``tritongate:queue_full: 512 requests are waiting already``.
"""

import enum
import re


class RefusalCode(enum.StrEnum):
    """Why a request was refused or ended without its answer."""

    INVALID_REQUEST = "invalid_request"
    INVALID_GRAMMAR = "invalid_grammar"
    """The request's grammar is broken or too large, or cannot be enforced."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    CHANNEL_LOST = "channel_lost"
    """The delta channel that the request names is not open, or no longer open."""
    SHUTTING_DOWN = "shutting_down"
    UNAVAILABLE = "unavailable"
    """The entry's engine has failed or died under the request, whose fault that was not."""
    INTERNAL = "internal"
    """The model failed on this request."""


LONGEST_MESSAGE = 1000
"""In characters. gRPC sends a status message in a header of at most 16 KiB, with non-ASCII bytes as `%XX`."""

_MESSAGE = re.compile(r"tritongate:([a-z_]+): (.*)", re.DOTALL)


def refusal_text(code: RefusalCode, message: str) -> str:
    """Return the message that carries `code`; it is truncated, because it may quote what a client sent."""
    return f"tritongate:{code}: {message[:LONGEST_MESSAGE]}"


def parse_refusal(text: str) -> tuple[RefusalCode, str] | None:
    """Find a refusal in an error text, to which Triton may have added a prefix; None if there is none."""
    found = _MESSAGE.search(text)
    if found is None or found[1] not in RefusalCode.__members__.values():
        return None
    return RefusalCode(found[1]), found[2]
