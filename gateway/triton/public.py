"""Public names on top of pools: the upstream of a gateway whose models may change while it runs.

A pool serves entries on one set of Tritons; what a client names is a public name or an alias, which stands
for an entry with what is set for it. When the settings of models change, a pool that would be made again just
as it is stays. Others are made and get a moment to meet their Tritons before names lead to them, and those to
which no name leads any more are closed after their last request.

If no models are set, there is one pool, and its entries are the public names.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from gateway.core.events import Event
from gateway.core.request import Generation, with_system
from gateway.core.upstream import Embedding, EntriesChanged, ModelCard, Tokenization, Tokens, Vector
from gateway.errors import InvalidRequestError, ModelNotFoundError
from gateway.settings import Settings
from gateway.settings.models import ModelSettings, public_name
from gateway.telemetry.metrics import UpstreamState
from gateway.triton.dialects.base import ModelReport
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import Replica, ReplicaState
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
    pinned: tuple[str, ...] = ()
    """Entries that are not unloaded for others, nor idle."""


MakePool = Callable[[Plan, Callable[[str], Sequence[str]]], TritonUpstream]
"""Makes the pool of a plan, given what returns the public names of an entry."""


@dataclass(frozen=True, slots=True)
class _Served:
    """One public name."""

    name: str
    settings: ModelSettings
    pool: TritonUpstream
    adapter: str | None = None
    """The LoRA adapter that is meant, which a backend does not tell: the settings name it."""

    def request(self, request: R) -> R:
        """Return a client's request as one for the entry, with what is set for the name."""
        changes: dict[str, Any] = {}
        if request.model != self.settings.entry or self.name != self.settings.entry:
            changes |= {"model": self.settings.entry, "public_name": self.name}
        if self.settings.system is not None:
            changes["prompt"] = with_system(request.prompt, self.settings.system)
        if isinstance(request, Generation):
            changes |= self._sampling(request)
            if self.adapter is not None:
                changes["adapter"] = self.adapter
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
    """Serves what the settings say of models; `apply` changes it."""

    def __init__(self, settings: Settings, make_pool: MakePool) -> None:
        self._make = make_pool
        self._settings = settings
        self._pools: dict[Plan, TritonUpstream] = {}
        self._served: dict[str, _Served] = {}
        """By public name; empty: whatever is found."""
        self._names: dict[str, str] = {}
        """Public names by themselves and their aliases."""
        self._adapters: dict[str, str] = {}
        """Names of models by those of their adapters."""
        self._created: dict[str, int] = {}
        self._retiring: dict[TritonUpstream, asyncio.Task[None]] = {}

    async def start(self) -> None:  # noqa: D102 - inherited
        await self.apply(self._settings)

    async def asked(self, within_s: float) -> None:
        """Wait until the Tritons of all models were asked, those that answer, or for so long."""
        await _asked(tuple(self._pools.values()), within_s)

    async def close(self) -> None:  # noqa: D102 - inherited
        for task in self._retiring.values():
            task.cancel()
        await asyncio.gather(*self._retiring.values(), return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in (*self._pools.values(), *self._retiring)))

    async def reached(self, deadline: float) -> None:  # noqa: D102 - inherited
        for pool in tuple(self._pools.values()):
            await pool.reached(deadline)

    async def met(self, model_id: str, deadline: float) -> None:  # noqa: D102 - inherited
        served = self._find(model_id)
        await served.pool.met(served.settings.entry, deadline)

    def models(self) -> list[ModelCard]:  # noqa: D102 - inherited
        if self._served:
            cards = [self._card(served) for served in self._served.values()]
        else:
            cards = [
                replace(card, settings=self._settings.model(card.id))
                for pool in self._pools.values()
                for card in pool.models()
            ]
        return [
            each
            for card in cards
            for each in (
                card,
                *(_of_adapter(adapter, card) for adapter, name in self._adapters.items() if name == card.id),
            )
        ]

    def model(self, model_id: str) -> ModelCard:  # noqa: D102 - inherited
        return self._card(self._find(model_id))

    def replicas(self) -> list[tuple[str, Replica]]:
        """Return the replicas of all models, each with a public name; an entry may have several."""
        return [
            (name, replica)
            for plan, pool in self._pools.items()
            for replica in pool.replicas()
            for name in self._names_of(plan, replica.model)
        ]

    def states(self) -> Iterator[UpstreamState]:
        """Yield how every model is on each of its Tritons, by public names."""
        for name, replica in self.replicas():
            ready = replica.state is ReplicaState.READY
            report = replica.report if ready and replica.report is not None else ModelReport()
            yield UpstreamState(
                model=name,
                upstream=replica.upstream,
                healthy=ready
                or (replica.on_demand and (replica.state is ReplicaState.UNLOADED or replica.loading)),
                waiting=report.waiting,
                kv_usage=report.kv_usage,
            )

    def generate(self, request: Generation) -> AsyncGenerator[Event, None]:  # noqa: D102 - inherited
        served = self._find(request.model)
        return served.pool.generate(served.request(request))

    async def tokenize(self, request: Tokenization) -> Tokens:
        """See `gateway.core.upstream.Upstream.tokenize`; an adapter has its model's tokenizer."""
        served = self._find(request.model)
        return await served.pool.tokenize(served.request(request))

    async def embed(self, request: Embedding) -> Vector:
        """See `gateway.core.upstream.Upstream.embed`; an adapter does not embed."""
        served = self._find(request.model)
        if served.adapter is not None:
            raise InvalidRequestError("The model does not embed: it is an adapter.", param="model")
        return await served.pool.embed(served.request(request))

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """See `gateway.core.upstream.Upstream.load`; adapters are loaded with their model."""
        served = self._find_model(model_id)
        return await served.pool.load(served.settings.entry, reload=reload, upstream=upstream)

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        """See `gateway.core.upstream.Upstream.unload`."""
        served = self._find_model(model_id)
        return await served.pool.unload(served.settings.entry, upstream=upstream)

    async def apply(self, settings: Settings) -> None:
        """Serve what `settings` say of models from now on; requests that run end as they began."""
        models = {name: settings.model(name) for name in settings.models}
        plans = plans_of(settings, models)
        pools = {
            plan: self._pools.get(plan) or self._make(plan, partial(self._names_of, plan)) for plan in plans
        }
        new = [pool for plan, pool in pools.items() if plan not in self._pools]
        for pool in new:
            await pool.start()
        if self._pools:  # else nobody is served meanwhile
            await _asked(new, _FIRST_LOOK_WITHIN_S)
        old = self._pools
        self._settings, self._pools = settings, pools
        plan_of = {name: plan for plan, names in plans.items() for name in names}
        self._served = {name: _Served(name, each, pools[plan_of[name]]) for name, each in models.items()}
        self._names = {each: name for name, model in models.items() for each in (name, *model.aliases)}
        given = (each.rpartition("=") for each in settings.adapters)
        self._adapters = {adapter: public_name(models, name) or name for adapter, _, name in given} | {
            adapter: name for name, model in models.items() for adapter in model.adapters
        }
        for plan, pool in old.items():
            if plan not in pools:
                self._retiring[pool] = asyncio.create_task(self._retire(pool), name="retire a pool")

    async def _retire(self, pool: TritonUpstream) -> None:
        """Close `pool` once nothing runs there; nothing new begins, except what got it in this turn."""
        await asyncio.sleep(_POLL_S)
        while pool.running:  # noqa: ASYNC110 - minutes at most, and nobody waits
            await asyncio.sleep(_POLL_S)
        await pool.close()
        del self._retiring[pool]

    def _names_of(self, plan: Plan, entry: str) -> list[str]:
        """Return the public names that lead to an entry by the pool of `plan`."""
        pool = self._pools.get(plan)
        if not plan.entries:
            return [] if pool is None else [entry]
        return [
            name
            for name, served in self._served.items()
            if served.pool is pool and served.settings.entry == entry
        ]

    def _find(self, model_id: str) -> _Served:
        """Return what serves a public name, an alias, or an adapter.

        Raises:
            ModelNotFoundError: nothing does.
        """
        if (parent := self._adapters.get(model_id)) is not None:
            return replace(self._find_model(parent), adapter=model_id)
        return self._find_model(model_id)

    def _find_model(self, model_id: str) -> _Served:
        """Return what serves a public name or an alias.

        Raises:
            ModelNotFoundError: nothing does.
            InvalidRequestError: it is an adapter's name.
        """
        if (parent := self._adapters.get(model_id)) is not None:
            raise InvalidRequestError(
                f"{model_id} is an adapter, loaded and unloaded with {parent}.", param="model"
            )
        if not self._served:  # the one pool knows what there is
            (pool,) = self._pools.values()
            return _Served(model_id, self._settings.model(model_id), pool)
        name = self._names.get(model_id)
        if name is None:
            raise ModelNotFoundError.of(model_id)
        return self._served[name]

    def _card(self, served: _Served) -> ModelCard:
        card = served.pool.model(served.settings.entry)
        created = self._created.setdefault(served.name, card.created)
        card = replace(card, id=served.name, created=created, settings=served.settings)
        return card if served.adapter is None else _of_adapter(served.adapter, card)


def _of_adapter(name: str, parent: ModelCard) -> ModelCard:
    settings = parent.settings.model_copy(update={"aliases": (), "adapters": ()})
    return replace(parent, id=name, parent=parent.id, settings=settings)


def plans_of(settings: Settings, models: Mapping[str, ModelSettings]) -> dict[Plan, list[str]]:
    """Return what pools are needed, each with its public names; without models, for whatever is found."""
    if not models:
        found = Plan(
            upstreams=settings.upstreams,
            entries=(),
            tokenizers=settings.tokenizers,
            dialects=(),
            pinned=settings.pinned_models,
        )
        return {found: []}
    pinned = {
        model.entry
        for name, model in models.items()
        if not {name, *model.aliases, model.entry}.isdisjoint(settings.pinned_models)
    }
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
            pinned=tuple(entry for entry in entries if entry in pinned),
        )
        plans[plan] = names
    return plans


async def _asked(pools: Sequence[TritonUpstream], within_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while any(  # noqa: ASYNC110 - as in `gateway.app`
                not pool.replicas() or any(each.state is ReplicaState.UNKNOWN for each in pool.replicas())
                for pool in pools
            ):
                await asyncio.sleep(_POLL_S)
