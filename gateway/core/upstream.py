"""The seam between HTTP and models: the protocol that the routes need.

The real implementation is `gateway.triton.public`; tests of the HTTP layer use a small fake. The seam uses
our own types, never server-sent events, OpenAI's JSON or protobuf. A prompt to be counted is the same as a
generation's (`gateway.core.request`), and rendered by the same code.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec import Struct

from gateway.core.events import Event
from gateway.core.request import Generation, Grammar, PlainText, Prompt, TokenIds
from gateway.settings.models import ModelSettings


class Tokenization(Struct, frozen=True, kw_only=True):
    """What is to be tokenized: a conversation or text into ids; ids into text."""

    request_id: str
    model: str
    public_name: str | None = None
    """What the model is called outside, if not the same."""
    prompt: Prompt
    deadline: float
    """Of the event loop's clock, in seconds."""
    prefix: bool = True
    """Of text: with the ids that begin every prompt in front, as a generation has them."""
    answer_next: bool = True
    """Of a conversation: up to where the model's answer begins, as a generation has it."""
    grammar: Grammar | None = None
    """Of a conversation: a constraint on the answer's text."""
    strings: bool = False
    """Also return how each token is displayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The ids of text or a conversation, perhaps a million, or the text of ids, without special ones.

    With ids, `text` is what they were made of, where the gateway itself knows it.
    """

    ids: Sequence[int] = ()
    text: str = ""
    strings: Sequence[str] | None = None
    """How each token is displayed, if requested."""
    pad: int | None = None
    """The id that fills up what is too short, where the gateway knows the model's tokenizer."""


class Embedding(Struct, frozen=True, kw_only=True):
    """A text, or its ids, whose vector is wanted."""

    request_id: str
    model: str
    public_name: str | None = None
    """As in `Generation`."""
    prompt: PlainText | TokenIds
    deadline: float
    """Of the event loop's clock, in seconds."""
    dimensions: int | None = None
    """Length of the vector; None: as the model has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """The vector of a text."""

    values: Sequence[float]
    tokens: int
    """Of the text."""


NOTHING_SET: Final = ModelSettings(entry="?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model. `max_context` counts tokens of prompt and answer; None until the model was reached."""

    id: str
    """Its public name, whichever of its names was asked for."""
    ready: bool
    created: int
    """Unix time in seconds at which this gateway first saw the model."""
    max_context: int | None = None
    vocabulary: int | None = None
    """Number of ids, where the model reports logits of prompts; None until it was reached, or if it does
    not."""
    unloaded: bool = False
    """It was unloaded on purpose, and is not expected to answer until it is loaded again."""
    chat_format: str | None = None
    """The name of its chat format; None until the model was reached, or if it has none."""
    template_reads: frozenset[str] = frozenset()
    """Names that its chat template reads, where it is the gateway that renders it."""
    parent: str | None = None
    """Of an adapter: the model that it is applied to."""
    settings: ModelSettings = NOTHING_SET
    """What is set for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesChanged:
    """What a load or unload changed on one Triton: the entry of the model, or nothing."""

    upstream: str
    entries: tuple[str, ...]


class Upstream(Protocol):
    """Serves models."""

    def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request`: first `Accepted`, then deltas and heartbeats, ending after the delta with `usage`.

        A heartbeat before `Accepted`, about every second, means that the model is being loaded.

        Closing the generator, or cancelling the task that awaits it, cancels the work upstream.

        Raises:
            GatewayError: before or after the first event; the stream is over then.
        """
        ...

    async def tokenize(self, request: Tokenization) -> Tokens:
        """Run `request` on the model's tokenizer; cancelling the task cancels the work upstream.

        Raises:
            GatewayError: there is no answer.
        """
        ...

    async def embed(self, request: Embedding) -> Vector:
        """Return the vector of a text; cancelling the task cancels the work upstream.

        Raises:
            GatewayError: there is no answer; `InvalidRequestError` if the model does not embed.
        """
        ...

    async def reached(self, deadline: float) -> None:
        """Wait until it is known which models there are, for as long as requests wait for a Triton.

        `deadline` is that of the request that waits, of the event loop's clock.
        """
        ...

    async def met(self, model_id: str, deadline: float) -> None:
        """Wait, as `reached` does, until a Triton has told what a model is.

        Raises:
            GatewayError: as for `model`.
        """
        ...

    def models(self) -> list[ModelCard]:
        """Return the models that are meant to be served, ready or not, in a stable order."""
        ...

    def model(self, model_id: str) -> ModelCard:
        """Return one model, by its public name or an alias.

        Raises:
            ModelNotFoundError: it is not among those.
        """
        ...

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """Load a model and wait until it answers; one that is loaded stays as it is, unless `reload`.

        Args:
            model_id: of a model that is served, or may be.
            reload: unload first what is loaded, once its requests in flight have ended.
            upstream: address of the one Triton to do it on; None: on all that have the model.

        Raises:
            GatewayError: it could not be loaded; `ConflictError` while another call is changing it.
        """
        ...

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        """Unload a model: refuse new requests at once, and unload it when those in flight have ended.

        Raises:
            GatewayError: as for `load`.
        """
        ...

    async def start(self) -> None:
        """Connect and begin watching health; returns without waiting for readiness."""
        ...

    async def close(self) -> None:
        """Stop watching and close the channels; running generations end with `UnavailableError`."""
        ...
