"""Public names on top of pools: the upstream of a gateway whose models may change while it runs.

A pool serves entries on one set of Tritons; what a client names is a public name or an alias, which stands
for an entry with what is set for it. When the settings of models change, a pool that would be made again just
as it is stays. Others are made and get a moment to meet their Tritons before names lead to them, and those to
which no name leads any more are closed after their last request.

If no models are set, there is one pool, and its entries are the public names.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from msgspec import structs

from gateway.core.events import Event
from gateway.core.request import Generation, with_system
from gateway.core.upstream import Embedding, EntriesChanged, ModelCard, Tokenization, Tokens, Vector
from gateway.errors import InvalidRequestError, ModelNotFoundError
from gateway.settings import Settings
from gateway.settings.models import ModelSettings
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import Replica, ReplicaState, UpstreamObserver
from wire.limits import STOPS_LIMIT

R = TypeVar("R", Generation, Tokenization, Embedding)

_FIRST_LOOK_WITHIN_S = 3.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a pool is made of; equal plans are one pool."""

    upstreams: tuple[str, ...]
    entries: tuple[str, ...]
    """Empty: whatever is found."""
    tokenizers: tuple[str, ...]
    """As for `gateway.triton.dialects.Dialects`."""
    dialects: tuple[tuple[str, str], ...]
    """Entries with the dialects demanded of them."""
    gib: tuple[tuple[str, float], ...] = ()
    """Entries with the memory that they take."""


MakePool = Callable[[Plan, UpstreamObserver | None], TritonUpstream]


class NamesObserver(UpstreamObserver, Protocol):
    """An observer that is told public names, and which of them there are no more."""

    def model_left(self, model: str) -> None:
        """`model` is not served any more, or not where it was."""
        ...


@dataclass(frozen=True, slots=True)
class _Served:
    """One public name."""

    name: str
    settings: ModelSettings
    pool: TritonUpstream

    def request(self, request: R) -> R:
        """Return a client's request as one for the entry, with what is set for the name."""
        changes: dict[str, Any] = {}
        if request.model != self.settings.entry or self.name != self.settings.entry:
            changes |= {"model": self.settings.entry, "public_name": self.name}
        if self.settings.system is not None:
            changes["prompt"] = with_system(request.prompt, self.settings.system)
        if isinstance(request, Generation):
            changes |= self._sampling(request)
        return structs.replace(request, **changes) if changes else request

    def _sampling(self, request: Generation) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.settings.stop:
            stop = dict.fromkeys([*request.stop, *self.settings.stop])
            if len(stop) > STOPS_LIMIT:
                raise InvalidRequestError(
                    f"With the model's own there are {len(stop)} stop strings; {STOPS_LIMIT} are allowed.",
                    param="stop",
                )
            changes["stop"] = list(stop)
        if request.max_tokens is None or request.max_tokens_yields:
            # A client of Triton sets a limit, though another one.
            default = None if request.max_total_tokens is not None else self.settings.defaults.max_tokens
            bounds = (default or request.max_tokens, self.settings.limits.max_tokens)
            if (bound := min((each for each in bounds if each is not None), default=None)) is not None:
                changes |= {"max_tokens": max(bound, request.min_tokens), "max_tokens_yields": True}
        return changes


class PublicModels:
    """Serves what the settings say of models; `apply` changes it.

    Args:
        settings: the gateway's.
        make_pool: makes the pool of a plan.
        observer: told of health and errors, by public names.
    """

    def __init__(self, settings: Settings, make_pool: MakePool, observer: NamesObserver | None) -> None:
        self._make = make_pool
        self._observer = observer
        self._settings = settings
        self._pools: dict[Plan, TritonUpstream] = {}
        self._running: Counter[TritonUpstream] = Counter()
        """Requests on each pool."""
        self._served: dict[str, _Served] = {}
        """By public name; empty: whatever is found."""
        self._names: dict[str, str] = {}
        """Public names by themselves and their aliases."""
        self._adapters: dict[str, str] = {}
        self._created: dict[str, int] = {}
        self._retiring: dict[TritonUpstream, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Connect; see `gateway.core.upstream.Upstream.start`."""
        await self._lead_to(self._settings, wait=False)

    async def apply(self, settings: Settings) -> None:
        """Serve what `settings` say of models from now on; requests that run end as they began.

        Args:
            settings: the gateway's with other models.
        """
        await self._lead_to(settings, wait=True)

    async def close(self) -> None:
        """See `gateway.core.upstream.Upstream.close`."""
        for task in self._retiring.values():
            task.cancel()
        await asyncio.gather(*self._retiring.values(), return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in (*self._pools.values(), *self._retiring)))

    def models(self) -> list[ModelCard]:
        """See `gateway.core.upstream.Upstream.models`."""
        if self._served:
            return [self._card(served) for served in self._served.values()]
        return [
            replace(card, settings=self._settings.model(card.id))
            for pool in self._pools.values()
            for card in pool.models()
        ]

    def model(self, model_id: str) -> ModelCard:
        """See `gateway.core.upstream.Upstream.model`."""
        return self._card(self._find(model_id))

    def adapters(self) -> Mapping[str, str]:
        """Return the public names of models that have adapters, by the adapters' names."""
        return self._adapters

    def replicas(self) -> list[tuple[str, Replica]]:
        """Return the replicas of all models, each with a public name; an entry may have several."""
        return [
            (name, replica)
            for plan, pool in self._pools.items()
            for replica in pool.replicas()
            for name in self.names(plan, replica.model)
        ]

    def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """See `gateway.core.upstream.Upstream.generate`."""
        served = self._find(request.model)
        return _Counted(served.pool.generate(served.request(request)), self._in_use(served.pool))

    async def tokenize(self, request: Tokenization) -> Tokens:
        """See `gateway.core.upstream.Upstream.tokenize`."""
        served = self._find(request.model)
        with self._in_use(served.pool):
            return await served.pool.tokenize(served.request(request))

    async def embed(self, request: Embedding) -> Vector:
        """See `gateway.core.upstream.Upstream.embed`."""
        served = self._find(request.model)
        with self._in_use(served.pool):
            return await served.pool.embed(served.request(request))

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """See `gateway.core.upstream.Upstream.load`."""
        served = self._find(model_id)
        with self._in_use(served.pool):
            return await served.pool.load(served.settings.entry, reload=reload, upstream=upstream)

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        """See `gateway.core.upstream.Upstream.unload`."""
        served = self._find(model_id)
        with self._in_use(served.pool):
            return await served.pool.unload(served.settings.entry, upstream=upstream)

    async def _lead_to(self, settings: Settings, *, wait: bool) -> None:
        models = {name: settings.model(name) for name in settings.models}
        plans = plans_of(settings, models)
        pools = {plan: self._pools.get(plan) or self._make(plan, self._of_pool(plan)) for plan in plans}
        new = [pool for plan, pool in pools.items() if plan not in self._pools]
        for pool in new:
            await pool.start()
        if wait:
            await _met(new)
        old, before = self._pools, self._served
        self._settings, self._pools = settings, pools
        plan_of = {name: plan for plan, names in plans.items() for name in names}
        self._served = {name: _Served(name, each, pools[plan_of[name]]) for name, each in models.items()}
        self._names = {each: name for name, model in models.items() for each in (name, *model.aliases)}
        given = (each.rpartition("=") for each in settings.adapters)
        self._adapters = {adapter: name for adapter, _, name in given} | {
            adapter: name for name, model in models.items() for adapter in model.adapters
        }
        for name, served in before.items():
            now = self._served.get(name)
            if self._observer is not None and (now is None or now.pool is not served.pool):
                self._observer.model_left(name)
        self.tell()
        for plan, pool in old.items():
            if plan not in pools:
                self._retiring[pool] = asyncio.create_task(self._retire(pool), name="retire a pool")

    async def _retire(self, pool: TritonUpstream) -> None:
        """Close `pool` once nothing runs there; nothing new begins."""
        while self._running[pool]:  # noqa: ASYNC110 - minutes at most, and nobody waits
            await asyncio.sleep(_POLL_S)
        await pool.close()
        del self._running[pool], self._retiring[pool]

    def tell(self) -> None:
        """Tell the observer the health of every model."""
        if self._observer is None:
            return
        for name, replica in self.replicas():
            healthy = replica.state is ReplicaState.READY
            self._observer.upstream_health(name, replica.upstream, healthy=healthy)

    def names(self, plan: Plan, entry: str) -> list[str]:
        """Return the public names that lead to an entry by the pool of `plan`."""
        pool = self._pools.get(plan)
        if not plan.entries:
            return [] if pool is None else [entry]
        return [
            name
            for name, served in self._served.items()
            if served.pool is pool and served.settings.entry == entry
        ]

    def _of_pool(self, plan: Plan) -> UpstreamObserver | None:
        return None if self._observer is None else _OfPool(self, self._observer, plan)

    def _find(self, model_id: str) -> _Served:
        """Return what serves a public name or an alias.

        Raises:
            ModelNotFoundError: nothing does.
        """
        if not self._served:  # the one pool knows what there is
            (pool,) = self._pools.values()
            return _Served(model_id, self._settings.model(model_id), pool)
        name = self._names.get(model_id)
        if name is None:
            raise ModelNotFoundError(f"The model {model_id!r} does not exist.", param="model")
        return self._served[name]

    def _card(self, served: _Served) -> ModelCard:
        card = served.pool.model(served.settings.entry)
        created = self._created.setdefault(served.name, card.created or int(time.time()))
        return replace(card, id=served.name, created=created, settings=served.settings)

    @contextmanager
    def _in_use(self, pool: TritonUpstream) -> Iterator[None]:
        self._running[pool] += 1
        try:
            yield
        finally:
            self._running[pool] -= 1


class _Counted(AsyncGenerator[Event, None]):
    """The events of a request, and its use of a pool, which ends when they are closed."""

    def __init__(self, events: AsyncGenerator[Event, None], use: AbstractContextManager[None]) -> None:
        self._events = events
        self._use = use
        use.__enter__()

    def __anext__(self) -> Coroutine[Any, Any, Event]:
        # No frame of its own: it is on the way of every token.
        return self._events.__anext__()

    async def asend(self, value: None) -> Event:
        return await self._events.asend(value)

    async def athrow(self, *error: Any) -> Event:
        return await self._events.athrow(*error)

    async def aclose(self) -> None:
        try:
            await self._events.aclose()
        finally:
            self._use.__exit__(None, None, None)


class _OfPool(UpstreamObserver):
    """Tells of one pool's entries by public names; silent once no name leads there."""

    def __init__(self, models: PublicModels, observer: UpstreamObserver, plan: Plan) -> None:
        self._models = models
        self._observer = observer
        self._plan = plan

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        for name in self._models.names(self._plan, model):
            self._observer.upstream_health(name, upstream, healthy=healthy)

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        self._observer.upstream_error(model, upstream, code)

    def resumed(self, model: str) -> None:
        self._observer.resumed(model)

    def model_loaded(self, model: str, upstream: str, seconds: float, *, failed: bool) -> None:
        for name in self._models.names(self._plan, model):
            self._observer.model_loaded(name, upstream, seconds, failed=failed)

    def model_unloaded(self, model: str, upstream: str, reason: str) -> None:
        for name in self._models.names(self._plan, model):
            self._observer.model_unloaded(name, upstream, reason)

    def upstream_left(self, upstream: str) -> None:
        self._observer.upstream_left(upstream)
        self._models.tell()  # it may be of another pool, too

    def upstream_forgotten(self, upstream: str) -> None:
        self._observer.upstream_forgotten(upstream)

    def upstream_lookup(self, upstream: str, outcome: str) -> None:
        self._observer.upstream_lookup(upstream, outcome)


def plans_of(settings: Settings, models: Mapping[str, ModelSettings]) -> dict[Plan, list[str]]:
    """Return what pools are needed, each with the public names that it serves.

    Args:
        settings: the gateway's.
        models: by public name; none: whatever is found is served.
    """
    if not models:
        found = Plan(upstreams=settings.upstreams, entries=(), tokenizers=settings.tokenizers, dialects=())
        return {found: []}
    by_upstreams: dict[tuple[str, ...], list[str]] = {}
    for name, model in models.items():
        by_upstreams.setdefault(model.upstreams, []).append(name)
    plans = {}
    for upstreams, names in by_upstreams.items():
        entries = {models[name].entry: models[name] for name in names}
        plan = Plan(
            upstreams=upstreams,
            entries=tuple(entries),
            tokenizers=tuple(
                f"{entry}={each.tokenizer}" for entry, each in entries.items() if each.tokenizer
            ),
            dialects=tuple(
                (entry, each.dialect) for entry, each in entries.items() if each.dialect != "auto"
            ),
            gib=tuple((entry, each.memory_gib) for entry, each in entries.items() if each.memory_gib),
        )
        plans[plan] = names
    return plans


async def _met(pools: Sequence[TritonUpstream]) -> None:
    """Wait a little until the Tritons of new pools were asked, those that answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_LOOK_WITHIN_S):
            while any(  # noqa: ASYNC110 - as in `gateway.app`
                not pool.replicas() or any(each.state is ReplicaState.UNKNOWN for each in pool.replicas())
                for pool in pools
            ):
                await asyncio.sleep(_POLL_S)
