"""The seam between HTTP and models: the protocol that the routes need.

The real implementation is `gateway.triton.pool`; tests of the HTTP layer use a small fake. The seam uses our
own types, never SSE strings, OpenAI JSON or protobuf.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from gateway.generation import Event, Generation
from gateway.tokenization import Tokenization, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model. `max_context` counts tokens of prompt and answer; None until the model was reached."""

    id: str
    ready: bool
    created: int
    """Unix time in seconds at which this gateway first saw the model."""
    max_context: int | None = None
    unloaded: bool = False
    """It was unloaded on purpose, and is not expected to answer until it is loaded again."""
    chat_format: str | None = None
    """The name of its chat format; None until the model was reached, or if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesChanged:
    """What a load or unload changed on one Triton: the entry of the model, or nothing."""

    upstream: str
    entries: tuple[str, ...]


class Upstream(Protocol):
    """Serves models."""

    def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request`: first `Accepted`, then deltas and heartbeats, ending after the delta with `usage`.

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

    def models(self) -> list[ModelCard]:
        """Return the models that are meant to be served, ready or not, in a stable order."""
        ...

    def model(self, model_id: str) -> ModelCard:
        """Return one model.

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
