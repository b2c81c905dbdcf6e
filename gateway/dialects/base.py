"""Dialects: each translates between our request and event types and one upstream tensor contract.

A dialect knows tensors and our events. It knows nothing of channels, replicas or HTTP, does no input or
output, and is shared by all requests; the state of one answer is in that answer's decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tritonclient.grpc import service_pb2

from gateway.generation import Event, Generation
from gateway.tokenization import Tokenization, Tokens
from wire.channel import Frame
from wire.meta import Delivered
from wire.sampling import ChannelStream

AnswerDelta = tuple[int, str, int, bytes | None]
"""A delta from a delta channel: index of its choice, text, number of tokens, and a document with anything
else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model's answer to a probe."""

    heartbeat_age_s: float
    """Seconds since the engine's last loop iteration."""
    chat_format: str
    """Name of the model's chat format."""
    max_context: int
    """Prompt and answer together, in tokens."""
    delta_channel: bool = False
    """Whether deltas can come over a channel (see `ChannelDialect`)."""


class AnswerDecoder(Protocol):
    """Reads the responses of one generation, in order."""

    def decode(self, response: service_pb2.ModelInferResponse) -> list[Event]:
        """Return the events in `response`.

        Raises:
            UpstreamProtocolError: it cannot be understood, or comes out of order.
        """
        ...

    def end(self) -> None:
        """Check, when no response is left, that the answer was whole.

        Raises:
            UpstreamProtocolError: it was not.
        """
        ...


class Dialect(Protocol):
    """One tensor contract."""

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that identify a model of this contract."""
        ...

    def probe(self, model: str) -> service_pb2.ModelInferRequest:
        """Return the request that probes `model`."""
        ...

    def read_probe(self, responses: Sequence[service_pb2.ModelInferResponse]) -> ModelReport:
        """Read all the responses to `probe`.

        Raises:
            UpstreamProtocolError: they cannot be understood.
        """
        ...

    def request(
        self, generation: Generation, report: ModelReport, *, remaining_s: float
    ) -> service_pb2.ModelInferRequest:
        """Return `generation` as tensors for the model that `report` is about.

        Args:
            generation: its ranges were checked.
            report: of the model that gets the request.
            remaining_s: seconds until the generation's deadline, above 0.

        Raises:
            InvalidRequestError: the model cannot express it.
        """
        ...

    def decoder(self, generation: Generation, report: ModelReport) -> AnswerDecoder:
        """Return a decoder for the answer of the model that `report` is about to `generation`."""
        ...


class ChannelDecoder(AnswerDecoder, Protocol):
    """Reads one answer whose deltas come over a channel."""

    def delivered(self, response: service_pb2.ModelInferResponse) -> tuple[int, Delivered] | None:
        """Return the choice that `response` ends, and how much of it must have come over the channel.

        Raises:
            UpstreamProtocolError: it cannot be understood, or ends a choice without saying so.
        """
        ...

    def deltas(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        """Return the events in the deltas from the channel, in order.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        ...


class ChannelDialect(Protocol):
    """The part of a tensor contract for delta channels (`wire.channel`)."""

    def open(self, model: str, channel_id: str) -> service_pb2.ModelInferRequest:
        """Return the request that opens a channel to `model`."""
        ...

    def read_frame(self, response: service_pb2.ModelInferResponse) -> Frame:
        """Read a response to `open`.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        ...

    def request(
        self, generation: Generation, report: ModelReport, *, remaining_s: float, channel: ChannelStream
    ) -> service_pb2.ModelInferRequest:
        """Like `Dialect.request`, with the deltas going to `channel`."""
        ...

    def decoder(self, generation: Generation, report: ModelReport) -> ChannelDecoder:
        """Return a decoder for the answer of the model that `report` is about to `generation`."""
        ...


class TokenizerDialect(Protocol):
    """The part of a tensor contract for the entry with the model's tokenizer."""

    def request(self, tokenization: Tokenization, report: ModelReport) -> service_pb2.ModelInferRequest:
        """Return `tokenization` as tensors for the model that `report` is about.

        Raises:
            InvalidRequestError: the model cannot express it.
        """
        ...

    def read(self, tokenization: Tokenization, response: service_pb2.ModelInferResponse) -> Tokens:
        """Read the one response to the request for `tokenization`.

        Raises:
            UpstreamProtocolError: it cannot be understood; for `strings`, while they are iterated.
        """
        ...


class NudgeDialect(Protocol):
    """The part of a tensor contract about nudges: requests that cost a model next to nothing.

    They have their own places in Triton's queue, so that they never take one of another request.
    """

    def streamed(self, model: str) -> service_pb2.ModelInferRequest:
        """Return one for the entry of generations, to be sent on a stream."""
        ...

    def whole(self, model: str) -> service_pb2.ModelInferRequest:
        """Return one for the tokenizer entry, which is answered by one response."""
        ...
