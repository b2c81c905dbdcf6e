"""Dialects: each translates between our request and event types and one upstream tensor contract.

A dialect is one record of functions, in a file of its own. It knows tensors and our events. It knows nothing
of connections, backends or HTTP, does no input or output, and is shared by all requests; the state of one
answer is in that answer's decoder. A part that is None is what models of the contract cannot do.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tritonclient.grpc import service_pb2

from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.core.upstream import Embedding, Tokenization, Tokens, Vector
from wire.channel import Frame
from wire.meta import Delivered
from wire.request import ChannelStream

Request: TypeAlias = service_pb2.ModelInferRequest
Response: TypeAlias = service_pb2.ModelInferResponse

AnswerDelta = tuple[int, str, int, Sequence[int], bytes | None]
"""A delta from a delta channel: index of its choice, text, number of tokens, their ids if the generation is
resumable, and a document with anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What is known of a model, by its answer to a probe; None: its contract does not tell."""

    heartbeat_age_s: float | None = None
    """Seconds since the last sign of life of the thread of the model that has been silent the longest."""
    open: int | None = None
    """Answers in progress or waiting in the engine, whoever asked for them."""
    waiting: int | None = None
    """How many of them wait."""
    begun: int | None = None
    """Generations since the model was loaded, whoever asked for them."""
    kv_usage: float | None = None
    """Share of the engine's KV blocks in use, 0 to 1."""
    chat_format: str | None = None
    """Name of the model's chat format."""
    max_context: int | None = None
    """Prompt and answer together, in tokens."""
    vocabulary: int | None = None
    """Number of ids of a model that reports the logits of prompts."""
    resumes: bool = False
    """An answer that was begun elsewhere can go on here: its decoder is a `ChannelDecoder`."""
    template_reads: frozenset[str] = frozenset()
    """Names that the chat template reads which the gateway renders: variables, and fields of messages."""


class AnswerDecoder(Protocol):
    """Reads the responses of one generation, in order."""

    @property
    def over(self) -> bool:
        """Whether the answer ends here, though the model may go on: no further response is to be read."""
        ...

    def decode(self, response: Response) -> list[Event]:
        """Return the events in `response`.

        Raises:
            UpstreamProtocolError: it cannot be understood, or comes out of order.
        """
        ...

    def end(self) -> Sequence[Event]:
        """Return what the answer's end itself tells, when no response is left.

        Raises:
            UpstreamProtocolError: the answer was not complete.
        """
        ...


class ChannelDecoder(AnswerDecoder, Protocol):
    """Reads one answer whose deltas come over a channel, or which is resumed; both, or neither."""

    def resume(self) -> tuple[tuple[int, ...] | None, ...]:
        """Expect the rest of the answer in another call's responses; returns `Generation.generated` for it.

        Only for a generation that is `resumable`, after an event of its first call was read.
        """
        ...

    @property
    def complete(self) -> bool:
        """Whether the final response was read."""
        ...

    def delivered(self, response: Response) -> tuple[int, Delivered] | None:
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


@dataclass(frozen=True, slots=True)
class Probe:
    """The part of a contract that tells whether a model's engine moves."""

    request: Callable[[str], Request]
    """Returns the request that probes a model, given its id."""
    read: Callable[[Sequence[Response]], ModelReport]
    """Reads all the responses to it. Raises UpstreamProtocolError: they cannot be understood."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The part of a contract for counting tokens."""

    request: Callable[[Tokenization, ModelReport, float], Request]
    """Returns a tokenization as tensors, with the seconds that are left for it, above 0.

    Raises InvalidRequestError: the model cannot express it.
    """
    read: Callable[[Tokenization, Sequence[Response]], Tokens]
    """Reads all the responses to it. Raises UpstreamProtocolError: they cannot be understood."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The part of a contract by which a model sends the tokenizer that the gateway needs for its prompts."""

    request: Callable[[str], Request]
    """Returns the request for them, given the model's id."""
    read: Callable[[Sequence[Response]], "Dialect"]
    """Returns the dialect of a model whose responses these are; takes long, and belongs on a thread.

    Raises UpstreamProtocolError: they cannot be used.
    """


@dataclass(frozen=True, slots=True)
class Embedder:
    """The part of a contract for vectors of texts."""

    request: Callable[[Embedding], Request]
    """Returns a text as tensors. Raises InvalidRequestError: the model cannot express it."""
    read: Callable[[Embedding, Sequence[Response]], Vector]
    """Reads all the responses to it. Raises UpstreamProtocolError: they cannot be understood."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The part of a contract for delta channels (`wire.channel`)."""

    open: Callable[[str, str], Request]
    """Returns the request that opens a channel to a model, given the ids of the model and of the channel."""
    read_frame: Callable[[Response], Frame]
    """Reads a response to it. Raises UpstreamProtocolError: it cannot be understood."""
    request: Callable[[Generation, ModelReport, float, ChannelStream], Request]
    """Like `Dialect.request`, with the deltas going to a stream of a channel."""
    decoder: Callable[[Generation, ModelReport], ChannelDecoder]
    """Like `Dialect.decoder`, for an answer whose deltas come over a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One tensor contract."""

    name: str = ""
    """What commands call it, and a configuration that demands it."""
    inputs: frozenset[str]
    """The names of the inputs that a model must have to be of this contract; it may have more."""
    request: Callable[[Generation, ModelReport, float], Request]
    """Returns a generation, whose ranges were checked, as tensors for the model that the report is about;
    with the seconds until its deadline, above 0.

    Raises InvalidRequestError: the model cannot express it.
    """
    decoder: Callable[[Generation, ModelReport], AnswerDecoder]
    """Returns a decoder for the answer to a generation of the model that the report is about."""
    prepare: Callable[[Generation, ModelReport], Awaitable[Generation]] | None = None
    """Does what takes long with a long prompt, off the event loop, and returns a generation for `request` and
    `decoder`, given the same report; None: they take any.

    Raises InvalidRequestError: the model cannot express it.
    """
    cancel: Callable[[Request], Request] | None = None
    """Returns the request that has the model end a generation, given what `request` returned for it; None: a
    generation ends when its stream is reset."""
    probe: Probe | None = None
    """None: whether a model serves is what Triton says, and what is known of it is in `report`."""
    report: ModelReport = field(default_factory=ModelReport)
    tokenizer: Tokenizer | None = None
    """The model counts tokens."""
    tokens: Callable[[Tokenization], Tokens] | None = None
    """The gateway counts them for a model without a chat format. Raises InvalidRequestError: it cannot."""
    tokenizer_files: TokenizerFiles | None = None
    """A model without a chat format is asked for these before it serves; None: the gateway has them, or the
    model has none."""
    embedder: Embedder | None = None
    """The model embeds."""
    adapters: bool = False
    """It applies LoRA adapters by their names."""
    counts_at_end: bool = False
    """Whether the `end` of its decoders counts tokens, and belongs on a thread."""
    heartbeats: bool = True
    """Whether something is heard every few seconds of a request that waits."""
    choices: bool = True
    """Whether a request may ask for several; False: each is a request of its own."""
    streams: bool | None = True
    """Whether its models take requests for streams; None: those that are configured to."""
    channels: Channels | None = None
    """None: an answer comes on its request's own stream."""
