"""Every error the gateway answers with, and the one with which it does not start (`ListenError`).

GatewayError
├── InvalidRequestError          400
│   ├── NoTemplateError          400
│   └── ContextLengthError       400  context_length_exceeded
├── AuthenticationError          401
├── PermissionDeniedError        403
│   └── ControlDisabledError     403  model_control_disabled
├── NotFoundError                404
│   └── ModelNotFoundError       404  model_not_found
├── MethodNotAllowedError        405
├── BodyTimeoutError             408
├── HeadersTimeoutError          408
├── ConflictError                409
├── BodyTooLargeError            413
├── UnsupportedMediaTypeError    415
├── RateLimitError               429  + Retry-After
│   └── QuotaError               429  insufficient_quota
├── HeadersTooLargeError         431
├── ClientGoneError              499  metrics and logs only
├── InternalError                500
├── UpstreamProtocolError        502
├── UnavailableError             503  + Retry-After
└── DeadlineError                504

Each class carries its HTTP status and OpenAI's `type` and `code`; `render` is the only place where an error
becomes JSON.
"""

from typing import ClassVar, Self

from msgspec import Struct


class GatewayError(Exception):
    """The base: what a client is told, never a traceback, a path or a secret.

    `param` is the dotted path of the offending field. `retry_after_s` becomes the Retry-After header; None:
    the class's. `reason` is for the log: the label by which metrics count this error, if they do, or why.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry_after_s: int | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class InvalidRequestError(GatewayError):
    """A value or a combination that cannot be honoured."""

    status = 400
    type = "invalid_request_error"


class NoTemplateError(InvalidRequestError):
    """A conversation for a model whose format nobody knows."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and max_tokens together, exceed the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(GatewayError):
    """No key, or one that is not known."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDeniedError(GatewayError):
    """A known key without the scope that the route asks for.

    `key_name` is its owner's, for metrics and the log.
    """

    status = 403
    type = "invalid_request_error"
    code = "insufficient_scope"
    key_name: str | None = None


class ControlDisabledError(PermissionDeniedError):
    """Models cannot be loaded and unloaded here, whatever the key."""

    code = "model_control_disabled"


class NotFoundError(GatewayError):
    """No such path or resource."""

    status = 404
    type = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    """No such model."""

    code = "model_not_found"

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the error for a name of no model that the caller may use, whether or not there is one."""
        return cls(f"The model {name!r} does not exist. GET /v1/models lists those that do.", param="model")


class MethodNotAllowedError(GatewayError):
    """The path exists for another method."""

    status = 405
    type = "invalid_request_error"


class BodyTimeoutError(GatewayError):
    """The client sent its body too slowly."""

    status = 408
    type = "invalid_request_error"


class HeadersTimeoutError(GatewayError):
    """The client sent its headers too slowly."""

    status = 408
    type = "invalid_request_error"


class ConflictError(GatewayError):
    """The same thing is being done already."""

    status = 409
    type = "invalid_request_error"


class BodyTooLargeError(GatewayError):
    """The body exceeds the limit."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaTypeError(GatewayError):
    """The body is not declared as JSON, or is encoded in a way that is not understood."""

    status = 415
    type = "invalid_request_error"


class RateLimitError(GatewayError):
    """A queue is full (the gateway's, Triton's or the engine's), or a key is at one of its bounds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = 1


class QuotaError(RateLimitError):
    """A key has used what it may use in a day."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class HeadersTooLargeError(GatewayError):
    """The request line and headers exceed the limit."""

    status = 431
    type = "invalid_request_error"


class ClientGoneError(GatewayError):
    """The client hung up; nobody reads this answer, only metrics and logs see it."""

    status = 499


class InternalError(GatewayError):
    """A fault of the gateway itself."""


class UpstreamProtocolError(GatewayError):
    """Triton answered what cannot be understood, or failed inside."""

    status = 502
    code = "upstream_error"


class UnavailableError(GatewayError):
    """Triton is unreachable, its model is not ready, or the gateway is draining."""

    status = 503
    code = "service_unavailable"
    retry_after_s = 1


class DeadlineError(GatewayError):
    """The request's time is over, here or in a queue."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class ErrorBody(Struct, frozen=True):
    """What went wrong; `param` is the dotted path of the offending field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(Struct, frozen=True):
    """Every answer that is not a success."""

    error: ErrorBody


def render(error: GatewayError) -> ErrorDocument:
    """Return OpenAI's error object for `error`."""
    return ErrorDocument(ErrorBody(error.message, error.type, error.param, error.code))


class ListenError(Exception):
    """An address cannot be listened on, so the gateway does not start; the message says why.

    Attributes:
        port: the port that cannot be had, if another one would help.
    """

    def __init__(self, message: str, *, port: int | None = None) -> None:
        super().__init__(message)
        self.port = port
