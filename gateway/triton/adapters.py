"""LoRA adapters as models: each is a name of its own for a model, which applies it to the request.

A backend does not tell over gRPC which adapters it has, so the configuration names them. Knows nothing of
how an adapter is requested: the entry's dialect does.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from msgspec import structs

from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.core.upstream import (
    Embedding,
    EntriesChanged,
    ModelCard,
    Tokenization,
    Tokens,
    Upstream,
    Vector,
)
from gateway.errors import InvalidRequestError


class WithAdapters:
    """An upstream that also serves adapters of its models. See `gateway.core.upstream.Upstream`.

    Args:
        upstream: serves the models.
        adapters: returns the models that have adapters, by the adapters' names in the backend. May change.
    """

    def __init__(self, upstream: Upstream, adapters: Callable[[], Mapping[str, str]]) -> None:
        self._upstream = upstream
        self._models = adapters

    def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request`: see `Upstream.generate`."""
        if (parent := self._models().get(request.model)) is not None:
            request = structs.replace(request, model=parent, adapter=request.model)
        return self._upstream.generate(request)

    async def tokenize(self, request: Tokenization) -> Tokens:
        """Run `request`: see `Upstream.tokenize`; an adapter has its model's tokenizer."""
        if (parent := self._models().get(request.model)) is not None:
            request = structs.replace(request, model=parent)
        return await self._upstream.tokenize(request)

    async def embed(self, request: Embedding) -> Vector:
        """Run `request`: see `Upstream.embed`; an adapter does not embed."""
        if request.model in self._models():
            raise InvalidRequestError("The model does not embed: it is an adapter.", param="model")
        return await self._upstream.embed(request)

    def models(self) -> list[ModelCard]:
        """Return the models, and behind each its adapters."""
        parents = self._models()
        return [
            card
            for model in self._upstream.models()
            for card in (model, *(_adapter(name, model) for name, has in parents.items() if has == model.id))
        ]

    def model(self, model_id: str) -> ModelCard:
        """Return one model: see `Upstream.model`."""
        parent = self._models().get(model_id)
        if parent is None:
            return self._upstream.model(model_id)
        return _adapter(model_id, self._upstream.model(parent))

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """Load a model: see `Upstream.load`; adapters are loaded with their model."""
        self._check_model(model_id)
        return await self._upstream.load(model_id, reload=reload, upstream=upstream)

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        """Unload a model: see `Upstream.unload`."""
        self._check_model(model_id)
        return await self._upstream.unload(model_id, upstream=upstream)

    async def start(self) -> None:
        """Connect: see `Upstream.start`."""
        await self._upstream.start()

    async def close(self) -> None:
        """Disconnect: see `Upstream.close`."""
        await self._upstream.close()

    def _check_model(self, model_id: str) -> None:
        if (parent := self._models().get(model_id)) is not None:
            raise InvalidRequestError(
                f"{model_id} is an adapter, loaded and unloaded with {parent}.", param="model"
            )


def _adapter(name: str, parent: ModelCard) -> ModelCard:
    settings = parent.settings.model_copy(update={"aliases": (), "adapters": ()})
    return replace(parent, id=name, parent=parent.id, settings=settings)
