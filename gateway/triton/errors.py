"""The one table from Triton's failures to the errors that our clients get.

Triton fails in four ways: a gRPC status; a bare text in `error_message` of an open stream, without a code; a
refusal from one of our models (`wire.refusal`) inside either; or silence. `classify` turns the first three
into a `Fault`, whose value says what it means; `gateway.triton.client` does so for the last. The texts are
those of tritonserver 2.51, where the end-to-end tests provoke them, except for those marked below.

Only a refusal's own words reach a client, first line only: everything else of Triton's text (tracebacks,
paths) is for the log.
"""

import enum
import re
from dataclasses import dataclass
from typing import Final

import grpc

from gateway.core.request import Generation, TokenIds
from gateway.core.upstream import Embedding, Tokenization
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
from wire.grammar import part_at_fault
from wire.refusal import RefusalCode, parse_refusal

MESSAGE_LIMIT = 500
"""How many characters of a refusal a client is shown."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a fault means for the client, for the choice of replicas, and for metrics."""

    code: str
    """The label `code` of `tritongate_upstream_errors_total`, and `reason` in a request's log line."""
    error: type[GatewayError]
    message: str
    """For the client, unless the upstream's refusal has a message of its own."""
    retry_after_s: int | None = None
    failover: bool = False
    """Another replica may be asked: before the first token, or to go on with an answer that has begun."""
    same_replica: bool = False
    """The same replica may be asked again."""
    own_words: bool = False
    """It is about the request itself: the refusal's own message is of use to the client, and no other is."""
    param: str | None = None
    """The parameter that it is about, whatever the request says."""

    @property
    def upstream_at_fault(self) -> bool:
        """Whether it is counted: neither the client nor the gateway itself caused it."""
        return not issubclass(self.error, InvalidRequestError | ClientGoneError) and self.code != "closed"


class Fault(enum.Enum):
    """How a call failed, and how that is treated."""

    INVALID_REQUEST = Treatment(
        "invalid_request", InvalidRequestError, "The model refused the request.", own_words=True
    )
    INVALID_GRAMMAR = Treatment(
        "invalid_grammar", InvalidRequestError, "The answer cannot be held to this grammar.", own_words=True
    )
    CONTEXT_LENGTH = Treatment(
        "context_length_exceeded",
        ContextLengthError,
        "The prompt exceeds the model's context.",
        own_words=True,
    )
    OTHER_TASK = Treatment(
        "other_task",
        InvalidRequestError,
        "The model does not do this: some models embed, others write text.",
        param="model",
    )
    NO_ADAPTER = Treatment(
        "no_adapter",
        InvalidRequestError,
        "The model's backend does not have this adapter.",
        failover=True,
        param="model",
    )
    """Another Triton may have it already, where they get a new one in turns."""
    NO_LOGIT_BIAS = Treatment(
        "no_logit_bias",
        InvalidRequestError,
        "The model's backend does not have 'logit_bias'.",
        param="logit_bias",
    )
    QUEUE_FULL = Treatment(
        "queue_full", RateLimitError, "The model's queue is full; try again shortly.", 1, failover=True
    )
    DEADLINE = Treatment("deadline_exceeded", DeadlineError, "The request's time is over.")
    UNREACHABLE = Treatment(
        "unreachable", UnavailableError, "The model's server cannot be reached.", 5, failover=True
    )
    """No connection, or a lost one."""
    NOT_READY = Treatment("not_ready", UnavailableError, "The model is not ready.", 5, failover=True)
    """The model is unknown there, loading, unloading or unloaded."""
    UNLOADED = Treatment("unloaded", UnavailableError, "The model is unloaded.", 5, failover=True)
    """The model was unloaded on purpose."""
    NOT_PERMITTED = Treatment(
        "not_permitted",
        ControlDisabledError,
        "Triton does not permit this: it needs --model-control-mode=explicit and, where its protocol "
        "model-repository is restricted, the gateway's setting repository_key.",
    )
    """Triton does not permit listing, loading or unloading its models."""
    STUB_DEAD = Treatment("stub_dead", UnavailableError, "The model's process has died.", 5, failover=True)
    """The model's process is dead, though Triton still calls the model ready."""
    SILENT = Treatment("silent", UnavailableError, "The model stopped answering.", 5, failover=True)
    """Nothing came for longer than the heartbeat interval allows."""
    CANCELLED = Treatment(
        "cancelled", UnavailableError, "The request was cancelled by the model's server.", 5
    )
    """Ended by a cancel request that came from somewhere else."""
    INTERNAL = Treatment(
        "internal", UpstreamProtocolError, "The model's server failed to answer the request."
    )
    """The model says that it failed on this request; it would on another replica, too."""
    UNKNOWN = Treatment(
        "unknown", UpstreamProtocolError, "The model's server failed to answer the request.", failover=True
    )
    """Triton or a model of others failed, with words that are not in the table below; a dying Triton may."""
    TOO_LARGE = Treatment(
        "message_too_large",
        InvalidRequestError,
        "The request, or the answer to it, is larger than the gateway takes from Triton.",
    )
    """The request or its answer exceeds our limit for gRPC messages."""
    TENSORS_REFUSED = Treatment(
        "tensors_refused", UpstreamProtocolError, "The model does not take the gateway's tensors."
    )
    """Triton refused the tensors: their names, datatypes or shapes are not the model's."""
    PROTOCOL = Treatment("protocol", UpstreamProtocolError, "The model's answer could not be understood.")
    CHANNEL_LOST = Treatment(
        "channel_lost",
        UnavailableError,
        "The connection that the answer came over was lost.",
        1,
        failover=True,
        same_replica=True,
    )
    """The answer's delta channel was lost; the model itself may be fine."""
    NO_CHANNEL = Treatment(
        "no_channel", UnavailableError, "The model cannot stream at the moment.", 1, failover=True
    )
    """The model's delta channel did not open in time."""
    UNREAD = Treatment("unread", ClientGoneError, "The client does not read its answer.")
    """The client does not read, and too much is waiting for it."""
    CLOSED = Treatment("closed", UnavailableError, "The gateway is shutting down.", 5)
    """The gateway itself is closing its connections."""

    @property
    def code(self) -> str:
        """The label `code` of `tritongate_upstream_errors_total`."""
        return self.value.code


COUNTED: Final = tuple(fault.code for fault in Fault if fault.value.upstream_at_fault)
"""The values of the label `code`."""

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

_TEXTS = [
    # Matched at the start of a text, after Triton's "[request id: ...] ", so that the same words inside a
    # model's exception do not count.
    # From entries with a queue policy, which ours do not have.
    (re.compile(r"Exceeds maximum queue size"), Fault.QUEUE_FULL),
    (re.compile(r"Request timeout expired"), Fault.DEADLINE),
    (re.compile(r"Stub process .*is not healthy"), Fault.STUB_DEAD),
    (re.compile(r"Request for unknown model"), Fault.NOT_READY),
    # From the official vLLM backend.
    (re.compile(r"Error generating stream: Model \S+ does not support '\w+' request"), Fault.OTHER_TASK),
    # It has logged why vLLM refused the parameters of sampling, and goes on without any.
    (
        re.compile(r"Error generating stream: 'NoneType' object has no attribute 'lora_name'"),
        Fault.INVALID_REQUEST,
    ),
    # Of the ids in a logit bias, which it leaves strings, as they are in JSON.
    (
        re.compile(r"Error generating stream: '<' not supported between instances of 'str'"),
        Fault.NO_LOGIT_BIAS,
    ),
    (re.compile(r"LoRA (?:\S+ is not supported|feature is not enabled)"), Fault.NO_ADAPTER),
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
    # grpc.aio's own, seldom provoked: the connection is lost while the request is being written.
    (re.compile(r"Failed \"execute_batch\"|Internal error from Core"), Fault.UNREACHABLE),
]

_OWN_WORDS = [
    # What vLLM, from 0.6 to 0.33, and TensorRT-LLM say of the request itself, anywhere in a text. Clients are
    # shown what matches: nothing before it, nor paths in brackets or behind a colon.
    (
        re.compile(
            r"(?<![^.:\n])[^.:\n]*(?:longer than the maximum model length|maximum context length is"
            r"|too long to fit into the model)[^\n]*"
            r"|Prompt length \(\d+\) exceeds maximum (?:input|sequence) length \(\d+\)"
        ),
        Fault.CONTEXT_LENGTH,
    ),
    (
        re.compile(
            r"Failed to (?:transform [a-z ]+ into a (?:grammar|regex)|convert the grammar from Lark to EBNF)"
            r"|Invalid (?:JSON )?grammar specification"
            r"|The provided JSON schema contains features not supported by \w+"
        ),
        Fault.INVALID_GRAMMAR,
    ),
    (
        re.compile(
            r"At most \d+ \w+\(s\) may be provided in one prompt\."
            r"|allowed_token_ids contains out-of-vocab token id"
            r"|The [a-z_, ]+ sampling parameters are not yet supported with speculative decoding"
            # How vLLM, from 0.14 on, ends whatever it says of one parameter of a request.
            r"|(?<=Error generating stream: )[^\n]+(?= \(parameter=\w+(?:, value=[^\n]*)?\)$)"
        ),
        Fault.INVALID_REQUEST,
    ),
    (re.compile(r"(?<=lora_name: )there is no adapter '[^'\n]*'"), Fault.NO_ADAPTER),  # of our entry
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

    def __init__(self, fault: Fault, detail: str, *, message: str | None = None) -> None:
        super().__init__(f"{fault.code}: {detail}")
        self.fault = fault
        self.error_type = fault.code
        """What traces call it."""
        self.detail = detail
        self.message = message or fault.value.message

    def to_gateway(self, request: Generation | Tokenization | Embedding | None = None) -> GatewayError:
        """Return the error for the client; `request` says which of its fields was refused."""
        treatment = self.fault.value
        param = treatment.param
        if isinstance(request, Generation) and self.fault is Fault.INVALID_GRAMMAR:
            part = part_at_fault(self.message)
            about_text = part is not None and part.tool is None
            param = request.grammar_field(None if part is None else part.tool, text=about_text)
        elif isinstance(request, Generation) and self.fault is Fault.INVALID_REQUEST:
            param = _field_in(self.message, request)
        return treatment.error(
            self.message, param=param, retry_after_s=treatment.retry_after_s, reason=self.fault.code
        )


def _field_in(message: str, request: Generation) -> str | None:
    """Return the field that a refusal in the model's own words is about: it begins with it."""
    first = message.partition(" ")[0].rstrip(":")
    if first == "prompt":
        return request.prompt_field or ("prompt" if isinstance(request.prompt, TokenIds) else None)
    return first if first in request.__struct_fields__ else None


def classify(text: str, code: grpc.StatusCode | None = None) -> TritonError:
    """Make an error from Triton's text and, if there was one, its gRPC status.

    A known text decides, since one status can mean several faults (UNAVAILABLE is a full queue as well as a
    lost connection) and a stream's texts have no status.
    """
    refusal = parse_refusal(text)
    if refusal is None or refusal[0] is RefusalCode.INVALID_REQUEST:  # as of an entry of ours around vLLM
        for pattern, fault in _OWN_WORDS:
            if (found := pattern.search(text)) is not None:
                return TritonError(fault, text, message=found[0].strip()[:MESSAGE_LIMIT])
    if refusal is not None:
        fault = _REFUSALS[refusal[0]]
        words = refusal[1].partition("\n")[0][:MESSAGE_LIMIT] if fault.value.own_words else None
        return TritonError(fault, text, message=words)
    prefix = _REQUEST_ID.match(text)
    start = prefix.end() if prefix else 0
    for pattern, fault in _TEXTS:
        if pattern.match(text, start):
            return TritonError(fault, text)
    return TritonError(_STATUSES.get(code, Fault.UNKNOWN), text)
