"""The one table from Triton's failures to the errors that our clients get.

Triton fails in four ways: a gRPC status; a bare text in `error_message` of an open stream, without a code; a
refusal from one of our models (`wire.refusal`) inside either; or silence. `classify` turns the first three
into a `Fault`, `gateway.triton.client` the last, and `TREATMENTS` says what each fault means. The texts are
those of tritonserver 2.51, where the end-to-end tests provoke them, except for those marked below.

Only a refusal's own words reach a client, first line only: everything else of Triton's text (tracebacks,
paths) is for the log.
"""

import enum
import re
from dataclasses import dataclass

import grpc

from gateway.errors import (
    ClientGoneError,
    ContextLengthError,
    ControlDisabledError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.generation import Generation
from wire.grammar import part_at_fault
from wire.refusal import RefusalCode, parse_refusal

MESSAGE_LIMIT = 500
"""How many characters of a refusal a client is shown."""


class Fault(enum.StrEnum):
    """How a call failed; the value is the label `code` of `tritongate_upstream_errors_total`."""

    INVALID_REQUEST = "invalid_request"
    INVALID_GRAMMAR = "invalid_grammar"
    CONTEXT_LENGTH = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline_exceeded"
    UNREACHABLE = "unreachable"
    """No connection, or a lost one."""
    NOT_READY = "not_ready"
    """The model is unknown there, loading, unloading or unloaded."""
    UNLOADED = "unloaded"
    """The model was unloaded on purpose."""
    NOT_PERMITTED = "not_permitted"
    """Triton does not permit listing, loading or unloading its models."""
    STUB_DEAD = "stub_dead"
    """The model's process is dead, though Triton still calls the model ready."""
    SILENT = "silent"
    """Nothing came for longer than the heartbeat interval allows."""
    CANCELLED = "cancelled"
    """Ended by a cancel request that came from somewhere else."""
    INTERNAL = "internal"
    """Triton or the model failed internally, or with an unknown message."""
    TOO_LARGE = "message_too_large"
    """The request or its answer exceeds our limit for gRPC messages."""
    TENSORS_REFUSED = "tensors_refused"
    """Triton refused the tensors: their names, datatypes or shapes are not the model's."""
    PROTOCOL = "protocol"
    """The answer cannot be understood."""
    CHANNEL_LOST = "channel_lost"
    """The answer's delta channel was lost; the model itself may be fine."""
    NO_CHANNEL = "no_channel"
    """The model's delta channel did not open in time."""
    UNREAD = "unread"
    """The client does not read, and too much is waiting for it."""
    CLOSED = "closed"
    """The gateway itself is closing its connections."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a fault means for the client and for the choice of replicas."""

    error: type[GatewayError]
    message: str
    """For the client, unless the upstream's refusal has a message of its own."""
    retry_after_s: int | None = None
    failover: bool = False
    """Another replica may be asked, as long as no token was delivered."""
    same_replica: bool = False
    """The same replica may be asked again."""


TREATMENTS = {
    Fault.INVALID_REQUEST: Treatment(InvalidRequestError, "The model refused the request."),
    Fault.INVALID_GRAMMAR: Treatment(InvalidRequestError, "The answer cannot be held to this grammar."),
    Fault.CONTEXT_LENGTH: Treatment(ContextLengthError, "The prompt exceeds the model's context."),
    Fault.QUEUE_FULL: Treatment(
        RateLimitError, "The model's queue is full; try again shortly.", retry_after_s=1, failover=True
    ),
    Fault.DEADLINE: Treatment(DeadlineError, "The request's time is over."),
    Fault.UNREACHABLE: Treatment(
        UnavailableError, "The model's server cannot be reached.", retry_after_s=5, failover=True
    ),
    Fault.NOT_READY: Treatment(UnavailableError, "The model is not ready.", retry_after_s=5, failover=True),
    Fault.UNLOADED: Treatment(UnavailableError, "The model is unloaded.", retry_after_s=5, failover=True),
    Fault.NOT_PERMITTED: Treatment(
        ControlDisabledError,
        "Triton does not permit this: it needs --model-control-mode=explicit and, where its protocol "
        "model-repository is restricted, the gateway's setting repository_key.",
    ),
    Fault.STUB_DEAD: Treatment(
        UnavailableError,
        "The model's process has died; it is being restarted.",
        retry_after_s=5,
        failover=True,
    ),
    Fault.SILENT: Treatment(UnavailableError, "The model stopped answering.", retry_after_s=5, failover=True),
    Fault.CANCELLED: Treatment(
        UnavailableError, "The request was cancelled by the model's server.", retry_after_s=5
    ),
    Fault.INTERNAL: Treatment(UpstreamProtocolError, "The model's server failed to answer the request."),
    Fault.TOO_LARGE: Treatment(
        InvalidRequestError, "The request, or the answer to it, is larger than the gateway takes from Triton."
    ),
    Fault.TENSORS_REFUSED: Treatment(UpstreamProtocolError, "The model does not take the gateway's tensors."),
    Fault.PROTOCOL: Treatment(UpstreamProtocolError, "The model's answer could not be understood."),
    Fault.CHANNEL_LOST: Treatment(
        UnavailableError,
        "The connection that the answer came over was lost.",
        retry_after_s=1,
        failover=True,
        same_replica=True,
    ),
    Fault.NO_CHANNEL: Treatment(
        UnavailableError, "The model cannot stream at the moment.", retry_after_s=1, failover=True
    ),
    Fault.UNREAD: Treatment(ClientGoneError, "The client does not read its answer."),
    Fault.CLOSED: Treatment(UnavailableError, "The gateway is shutting down.", retry_after_s=5),
}

_REFUSALS = {
    RefusalCode.INVALID_REQUEST: Fault.INVALID_REQUEST,
    RefusalCode.INVALID_GRAMMAR: Fault.INVALID_GRAMMAR,
    RefusalCode.CONTEXT_LENGTH_EXCEEDED: Fault.CONTEXT_LENGTH,
    RefusalCode.QUEUE_FULL: Fault.QUEUE_FULL,
    RefusalCode.DEADLINE_EXCEEDED: Fault.DEADLINE,
    RefusalCode.CANCELLED: Fault.CANCELLED,
    RefusalCode.CHANNEL_LOST: Fault.CHANNEL_LOST,
    RefusalCode.SHUTTING_DOWN: Fault.NOT_READY,
    RefusalCode.UNAVAILABLE: Fault.NOT_READY,
    RefusalCode.INTERNAL: Fault.INTERNAL,
}

_WORDS_FOR_CLIENTS = {Fault.INVALID_REQUEST, Fault.INVALID_GRAMMAR, Fault.CONTEXT_LENGTH}
"""Refusals about the request itself: only their own messages are of use to the client."""

_TEXTS = [
    # Matched at the start of a text, after Triton's "[request id: ...] ", so that the same words inside a
    # model's exception do not count.
    # From entries with a queue policy, which ours do not have.
    (re.compile(r"Exceeds maximum queue size"), Fault.QUEUE_FULL),
    (re.compile(r"Request timeout expired"), Fault.DEADLINE),
    (re.compile(r"Stub process .*is not healthy"), Fault.STUB_DEAD),
    (re.compile(r"Request for unknown model"), Fault.NOT_READY),
    (re.compile(r"explicit model load / unload is not allowed"), Fault.NOT_PERMITTED),
    (re.compile(r"This protocol is restricted"), Fault.NOT_PERMITTED),
    # Found in the server's binary, not provoked: sent while it shuts down.
    (re.compile(r"Server not ready"), Fault.NOT_READY),
    (re.compile(r"Server is stopping"), Fault.NOT_READY),
    # grpc's own, with or without a prefix for its side.
    (
        re.compile(r"(?:Stream removed \()?(?:CLIENT: )?(?:Received|Sent) message larger than max"),
        Fault.TOO_LARGE,
    ),
    # Not provoked either: the connection is lost while the request is being written.
    (re.compile(r"Failed \"execute_batch\""), Fault.UNREACHABLE),
]

# Clients choose request ids, which may hold a bracket but never a space.
_REQUEST_ID = re.compile(r"\[request id: \S*\] ")

_STATUSES = {
    grpc.StatusCode.UNAVAILABLE: Fault.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.DEADLINE,
    # Without a refusal: a reset by the server's end or by a proxy, since our own cancels never come back as a
    # status.
    grpc.StatusCode.CANCELLED: Fault.UNREACHABLE,
    grpc.StatusCode.NOT_FOUND: Fault.NOT_READY,
    grpc.StatusCode.INVALID_ARGUMENT: Fault.TENSORS_REFUSED,
}


class TritonError(Exception):
    """A call to Triton failed. Stays inside this package: `to_gateway` is what leaves it.

    `message` may be shown to a client; `detail` is the raw text, for the log only.
    """

    def __init__(
        self, fault: Fault, detail: str, *, message: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail
        self.message = message or TREATMENTS[fault].message
        self.param = param
        """The field of the request that is at fault, if known."""

    def blame_grammar(self, request: Generation) -> "TritonError":
        """Return this error with the source of the refused grammar in `request` as its `param`."""
        if self.fault is not Fault.INVALID_GRAMMAR:
            return self
        part = part_at_fault(self.message)
        about_text = part is not None and part.tool is None
        field = request.grammar_field(None if part is None else part.tool, text=about_text)
        return TritonError(self.fault, self.detail, message=self.message, param=field)

    @property
    def failover(self) -> bool:
        """Whether another replica may be asked."""
        return TREATMENTS[self.fault].failover

    @property
    def same_replica(self) -> bool:
        """Whether the same replica may be asked again."""
        return TREATMENTS[self.fault].same_replica

    def to_gateway(self) -> GatewayError:
        """Return the error for the client."""
        treatment = TREATMENTS[self.fault]
        return treatment.error(self.message, param=self.param, retry_after_s=treatment.retry_after_s)


def classify(text: str, code: grpc.StatusCode | None = None) -> TritonError:
    """Make an error from Triton's text and, if there was one, its gRPC status.

    A known text decides, since one status can mean several faults (UNAVAILABLE is a full queue as well as a
    lost connection) and a stream's texts have no status.
    """
    refusal = parse_refusal(text)
    if refusal is not None:
        fault = _REFUSALS[refusal[0]]
        words = refusal[1].partition("\n")[0][:MESSAGE_LIMIT] if fault in _WORDS_FOR_CLIENTS else None
        return TritonError(fault, text, message=words)
    prefix = _REQUEST_ID.match(text)
    start = prefix.end() if prefix else 0
    for pattern, fault in _TEXTS:
        if pattern.match(text, start):
            return TritonError(fault, text)
    return TritonError(_STATUSES.get(code, Fault.INTERNAL), text)
