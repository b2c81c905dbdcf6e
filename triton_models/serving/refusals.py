"""The refusal code for each error that can happen before a request is queued."""

import logging

import msgspec

from triton_models.errors import (
    ChannelLostError,
    EngineStoppedError,
    InvalidGrammarError,
    LibraryPanicError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)

_REFUSALS: tuple[tuple[type[Exception], RefusalCode], ...] = (
    (PromptTooLongError, RefusalCode.CONTEXT_LENGTH_EXCEEDED),
    (QueueFullError, RefusalCode.QUEUE_FULL),
    (EngineStoppedError, RefusalCode.SHUTTING_DOWN),
    (InvalidGrammarError, RefusalCode.INVALID_GRAMMAR),
    (LibraryPanicError, RefusalCode.INTERNAL),
    (ChannelLostError, RefusalCode.CHANNEL_LOST),
    (ModelError, RefusalCode.INVALID_REQUEST),
    (msgspec.MsgspecError, RefusalCode.INVALID_REQUEST),
    (UnicodeDecodeError, RefusalCode.INVALID_REQUEST),
)
"""The first matching class decides; anything else is an internal error."""


def refusal(error: Exception) -> tuple[RefusalCode, str]:
    """Return the code and the message for the client."""
    for kind, code in _REFUSALS:
        if isinstance(error, kind):
            return code, str(error)
    log.error("a request failed before it was queued", exc_info=error)
    return RefusalCode.INTERNAL, "the request could not be prepared"
