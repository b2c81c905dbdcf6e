"""Errors as clients of `/v1/messages` read them: Anthropic's types, and the status that all routes have."""

import re
from collections.abc import Mapping
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from gateway.chat.conversation import ANSWERED_TWICE, NO_CALL, NO_RESULT
from gateway.errors import ContextLengthError, GatewayError

REQUEST_ID_HEADER: Final = "Request-Id"
"""Where these clients look for a request's id."""

_ROUTE: Final = "/v1/messages"
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER_ERROR: Final = 500

_TOGETHER: Final = re.compile(
    r"context length is (\d+) tokens\. However, you requested \d+ tokens \((\d+) in the \w+, (\d+) in the"
)
"""How our own models and vLLM say that there is room for the prompt, but not for `max_tokens`, too."""

_WORDS: Final[Mapping[str, str]] = {
    ANSWERED_TWICE: "each `tool_use` must have a single `tool_result`, and this is the second of one.",
    NO_CALL: "unexpected `tool_use_id` found in `tool_result` blocks. Each `tool_result` block must have a "
    "corresponding `tool_use` block in the previous message.",
    NO_RESULT: "`tool_use` ids were found without `tool_result` blocks immediately after. Each `tool_use` "
    "block must have a corresponding `tool_result` block in the next message.",
}
"""What is said of calls and results in OpenAI's words, in Anthropic's: agents look for some of them."""

THREAD: Final = "thread"
"""The field by which a client has its conversation kept on the server."""


class MessagesErrorDetails(Struct, frozen=True):
    """A cause that the SDK knows: told so of its field `thread`, a tool runner goes on without."""

    error_code: str
    unsupported: list[str]


_DETAILS: Final = {THREAD: MessagesErrorDetails("thread_unsupported_request", [THREAD])}


class MessagesErrorBody(Struct, frozen=True):
    """What went wrong; the message names the field, if it is about one."""

    type: str
    message: str
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesError(Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Every answer of `/v1/messages` that is not a success; in a stream, the event `error`."""

    error: MessagesErrorBody
    request_id: str


def is_of_messages(path: str) -> bool:
    """Whether clients of this path expect such errors."""
    return path == _ROUTE or path.startswith(_ROUTE + "/")


def messages_error(error: GatewayError, request_id: str) -> MessagesError:
    """Write `error`, which ended the request of that id."""
    other = "invalid_request_error" if error.status < _SERVER_ERROR else "api_error"
    message = _WORDS.get(error.message, error.message)
    if isinstance(error, ContextLengthError):
        message = _of_context(message)
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    details = _DETAILS.get(error.param or "", UNSET)
    return MessagesError(
        error=MessagesErrorBody(_TYPES.get(error.status, other), message, details), request_id=request_id
    )


def _of_context(message: str) -> str:
    """Say in Anthropic's words that the context is exceeded: agents look for them, since there is no code.

    They shorten the conversation, or else ask for fewer tokens by the three numbers.
    """
    sizes = _TOGETHER.search(message)
    if sizes is None:
        return f"prompt is too long: {message}"
    return "input length and `max_tokens` exceed context limit: {1} + {2} > {0}".format(*sizes.groups())
