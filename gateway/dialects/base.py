"""Dialects: each translates between our request and event types and one upstream tensor contract.

A dialect knows tensors and our events. It knows nothing of connections, backends or HTTP, does no input or
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
from wire.request import ChannelStream

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


class AnswerDecoder(Protocol):
    """Reads the responses of one generation, in order."""

    def decode(self, response: service_pb2.ModelInferResponse) -> list[Event]:
        """Return the events in `response`.

        Raises:
            UpstreamProtocolError: it cannot be understood, or comes out of order.
        """
        ...

    def end(self) -> None:
        """Check, when no response is left, that the answer was complete.

        Raises:
            UpstreamProtocolError: it was not.
        """
        ...


class ChannelDecoder(AnswerDecoder, Protocol):
    """Reads one answer whose deltas come over a channel."""

    @property
    def complete(self) -> bool:
        """Whether the final response was read."""
        ...

    def delivered(self, response: service_pb2.ModelInferResponse) -> tuple[int, Delivered] | None:
        """Return the choice that `response` ends, and how much of it must have come over the channel.

        Raises:
            UpstreamProtocolError: it cannot be understood, or ends a choice without saying so.
        """
        ...

    def deltas(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        """Return the events in the deltas from the channel, in order.

        Deltas of a choice that must come after something on the request's own stream are kept until `decode`
        has read it, and are among its events then.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        ...


class ChannelDialect(Protocol):
    """The part of a tensor contract for delta channels (`wire.channel`)."""

    def open_channel(self, model: str, channel_id: str) -> service_pb2.ModelInferRequest:
        """Return the request that opens a channel to `model`."""
        ...

    def read_frame(self, response: service_pb2.ModelInferResponse) -> Frame:
        """Read a response to `open_channel`.

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
        """Like `Dialect.decoder`, for an answer whose deltas come over a channel."""
        ...


class TokenizerDialect(Protocol):
    """The part of a tensor contract for counting tokens."""

    def tokenize(
        self, tokenization: Tokenization, report: ModelReport, *, remaining_s: float
    ) -> service_pb2.ModelInferRequest:
        """Return `tokenization` as tensors for the model that `report` is about.

        Raises:
            InvalidRequestError: the model cannot express it.
        """
        ...

    def read_tokens(
        self, tokenization: Tokenization, responses: Sequence[service_pb2.ModelInferResponse]
    ) -> Tokens:
        """Read all the responses to the request for `tokenization`.

        Raises:
            UpstreamProtocolError: they cannot be understood.
        """
        ...


class Dialect(Protocol):
    """One tensor contract. Its optional parts are None where it does not have them."""

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that identify a model of this contract."""
        ...

    @property
    def channels(self) -> ChannelDialect | None:
        """Delta channels; without them, an answer comes on its request's own stream."""
        ...

    @property
    def tokenizer(self) -> TokenizerDialect | None:
        """The model's tokenizer."""
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
