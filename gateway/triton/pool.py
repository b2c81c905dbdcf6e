"""The real `gateway.upstream.Upstream`: served models on one or many Tritons."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from gateway.errors import ModelNotFoundError, UnavailableError
from gateway.generation import Event, Generation
from gateway.upstream import ModelCard


class UpstreamObserver(Protocol):
    """What metrics want to hear. Called on the event loop; must not block."""

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        """`model` on `upstream` was found able, or unable, to take requests."""
        ...

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        """A generation failed on `upstream`; `code` is one of `gateway.triton.status.Fault`."""
        ...


class TritonUpstream:
    """Serves generations from the entries `M-stream` of one or many Tritons.

    Args:
        upstreams: gRPC addresses, `host:port`.
        models: ids of the models to serve; empty: every `M-stream` entry that the Tritons have.
        idle_timeout_s: seconds without any response after which a replica counts as dead for a request.
        observer: hears of health and errors.
    """

    def __init__(
        self,
        *,
        upstreams: Sequence[str],
        models: Sequence[str] = (),
        idle_timeout_s: float = 10.0,
        observer: UpstreamObserver | None = None,
    ) -> None:
        self._upstreams = tuple(upstreams)
        self._configured = tuple(models)
        self._idle_timeout_s = idle_timeout_s
        self._observer = observer

    async def start(self) -> None:
        """Connect and begin watching health; returns without waiting for readiness."""

    async def close(self) -> None:
        """Stop watching and close the channels; running generations end with `UnavailableError`."""

    def models(self) -> list[ModelCard]:
        """Return the models that are meant to be served, ready or not, in a stable order."""
        return []

    def model(self, model_id: str) -> ModelCard:
        """Return one model.

        Raises:
            ModelNotFoundError: it is not among those.
        """
        raise ModelNotFoundError(f"The model {model_id!r} does not exist.", param="model")

    async def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request`: see `gateway.upstream.Upstream.generate`."""
        raise UnavailableError(f"The model {request.model!r} is not ready.", retry_after_s=1)
        yield
