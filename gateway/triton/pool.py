"""The real `gateway.upstream.Upstream`: served models on one or many Tritons.

Chooses a replica for each generation and, until the first token was delivered, another one when that fails.
Finds the models by itself where the configuration names none. Knows nothing of HTTP or tensors.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.dialects.base import ModelReport
from gateway.errors import ModelNotFoundError, UpstreamProtocolError
from gateway.generation import Accepted, Delta, Event, Generation
from gateway.prediction import Prediction, PredictionAnswer
from gateway.tokenization import Tokenization, Tokens
from gateway.triton.answering import answer_over_channel, answer_plainly
from gateway.triton.backoff import Backoff
from gateway.triton.calls import Calls
from gateway.triton.channel import Channel
from gateway.triton.delta_link import DeltaLink
from gateway.triton.discovery import Discovery
from gateway.triton.failover import Tries
from gateway.triton.model_control import ModelControl
from gateway.triton.predicting import predict as predict_on
from gateway.triton.replicas import HealthPolicy, Replica, ReplicaState, UpstreamObserver
from gateway.triton.status import Fault, TritonError
from gateway.triton.tokenizing import tokenize as tokenize_on
from gateway.upstream import EntriesChanged, ModelCard

R = TypeVar("R", Prediction, Tokenization)
A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica as `tritongate check` and logs show it."""

    model: str
    upstream: str
    state: ReplicaState
    reason: str
    report: ModelReport | None
    """What the newest probe said; None until one was answered."""


@dataclass(slots=True)
class _Model:
    """A model that is meant to be served, wherever it may be at the moment."""

    id: str
    created: int
    replicas: list[Replica] = field(default_factory=list)

    def replica(self, channel: Channel) -> Replica | None:
        return next((replica for replica in self.replicas if replica.channel is channel), None)

    def card(self) -> ModelCard:
        ready = any(replica.state is ReplicaState.READY for replica in self.replicas)
        wanted = any(replica.wanted for replica in self.replicas)
        contexts = [replica.report.max_context for replica in self.replicas if replica.report is not None]
        return ModelCard(
            id=self.id,
            ready=ready,
            created=self.created,
            max_context=min(contexts, default=None),
            unloaded=bool(self.replicas) and not ready and not wanted,
        )


class TritonUpstream:
    """Serves generations from the entries `M-stream` of one or many Tritons.

    Args:
        upstreams: gRPC addresses, `host:port`.
        models: ids of the models to serve; empty: every `M-stream` entry of our contract that the Tritons
            have. A model once seen stays meant to be served while its Tritons are down.
        idle_timeout_s: seconds without any response after which a replica counts as dead for a request.
        load_timeout_s: longest load of an entry, and wait for the requests that hold an unloading one.
        observer: hears of health and errors.
        max_attempts: replicas that one generation may try.
        health: how the replicas are watched.
        delta_channel: let streamed answers come over one channel per model and Triton, where that offers it.
    """

    def __init__(
        self,
        *,
        upstreams: Sequence[str],
        models: Sequence[str] = (),
        idle_timeout_s: float = 10.0,
        load_timeout_s: float = 600.0,
        observer: UpstreamObserver | None = None,
        max_attempts: int = 3,
        health: HealthPolicy | None = None,
        delta_channel: bool = True,
    ) -> None:
        self._upstreams = tuple(dict.fromkeys(upstreams))
        self._configured = tuple(dict.fromkeys(models))
        self._idle_timeout_s = idle_timeout_s
        self._observer = observer
        self._max_attempts = max_attempts
        self._health = health or HealthPolicy()
        self._delta_channel = delta_channel
        now = int(time.time())
        self._models = {model_id: _Model(model_id, created=now) for model_id in self._configured}
        self._channels: list[Channel] = []
        self._control = ModelControl(
            self._channels, self._replica, self._add_replica, timeout_s=load_timeout_s
        )
        self._watchers: list[asyncio.Task[None]] = []
        self._repository_read = False
        self._closed = False

    async def start(self) -> None:
        """Connect and begin watching health; returns without waiting for readiness."""
        self._channels += [Channel(address) for address in self._upstreams]
        for channel in self._channels:
            for model_id in self._configured:
                self._add_replica(model_id, channel)
            if not self._configured:
                discovery = Discovery(channel, self._health, self._discovered)
                self._spawn(discovery.watch(), f"discover on {channel.address}")

    async def close(self) -> None:
        """Stop watching and close the channels; running generations end with `UnavailableError`."""
        self._closed = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for model in self._models.values():
            for replica in model.replicas:
                await replica.close()
        for channel in self._channels:
            await channel.close()

    def models(self) -> list[ModelCard]:
        """Return the models that are meant to be served: as configured, or those found, by name."""
        order = self._configured or sorted(self._models)
        return [self._models[model_id].card() for model_id in order if model_id in self._models]

    def model(self, model_id: str) -> ModelCard:
        """Return one model.

        Raises:
            ModelNotFoundError: it is not among those.
            UnavailableError: nobody can know, since no Triton was reached yet and none is configured.
        """
        return self._find(model_id).card()

    def replicas(self) -> list[ReplicaReport]:
        """Return every replica known, by model and upstream."""
        return [
            ReplicaReport(
                model=model.id,
                upstream=replica.upstream,
                state=replica.state,
                reason=replica.reason,
                report=replica.report,
            )
            for model in self._models.values()
            for replica in model.replicas
        ]

    async def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request`: see `gateway.upstream.Upstream.generate`."""
        tries, calls = self._tries(request), Calls(request)
        accepted = delivered = False
        while True:
            replica = tries.next()
            try:
                with calls.to(replica) as (call, asked):
                    async with contextlib.aclosing(self._attempt(replica, asked)) as events:
                        async for event in events:
                            if isinstance(event, Accepted):
                                call.event("accepted")
                                if accepted:
                                    continue  # by a second replica: the client was told already
                                accepted = True
                            elif isinstance(event, Delta) and not delivered:
                                call.event("first_token")
                                delivered = True
                            yield event
            except TritonError as error:
                replica.suspect(error)
                tries.failed(error.blame_grammar(request), delivered=delivered)
            else:
                return

    async def predict(self, request: Prediction) -> PredictionAnswer:
        """Run `request`: see `gateway.upstream.Upstream.predict`."""
        return await self._answer_whole(request, predict_on)

    async def tokenize(self, request: Tokenization) -> Tokens:
        """Run `request`: see `gateway.upstream.Upstream.tokenize`."""
        return await self._answer_whole(request, tokenize_on)

    async def _answer_whole(self, request: R, ask: Callable[[Replica, R], Awaitable[A]]) -> A:
        """Run `request`, which one response answers, on one replica after the other."""
        tries, calls = self._tries(request), Calls(request)
        while True:
            replica = tries.next()
            try:
                with calls.to(replica) as (_, asked), replica.in_use():
                    return await ask(replica, asked)
            except TritonError as error:
                if error.fault is Fault.UNREACHABLE:
                    replica.suspect(error)  # all else is the entry's own, not the engine's
                tries.failed(error)

    def _tries(self, request: Generation | Prediction | Tokenization) -> Tries:
        return Tries(
            lambda: self._find(request.model).replicas,
            request_id=request.request_id,
            limit=self._max_attempts,
            observer=self._observer,
        )

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """Load a model: see `gateway.upstream.Upstream.load`."""
        self._check_controllable(model_id)
        return await self._control.load(model_id, reload=reload, upstream=upstream)

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        """Unload a model: see `gateway.upstream.Upstream.unload`."""
        self._check_controllable(model_id)
        return await self._control.unload(model_id, upstream=upstream)

    def _check_controllable(self, model_id: str) -> None:
        """Refuse what may not be served; where the Tritons decide what is, any model of theirs may be."""
        if self._closed or self._configured:
            self._find(model_id)

    async def _attempt(self, replica: Replica, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request` on one replica; raises TritonError, or a GatewayError if it was never sent."""
        dialect, report = replica.serving()
        try:
            with replica.in_use():
                linked = await replica.open_link() if request.stream else None
                if linked is None:
                    answer = answer_plainly(
                        replica.channel, dialect, request, report, idle_timeout_s=self._idle_timeout_s
                    )
                else:
                    answer = answer_over_channel(replica.channel, *linked, request, report)
                async with contextlib.aclosing(answer) as events:
                    async for event in events:
                        yield event
        except UpstreamProtocolError as error:
            raise TritonError(Fault.PROTOCOL, error.message, message=error.message) from error

    def _find(self, model_id: str) -> _Model:
        if self._closed:
            raise TritonError(Fault.CLOSED, "the pool was closed").to_gateway()
        model = self._models.get(model_id)
        if model is not None:
            return model
        if not self._configured and not self._repository_read:
            # Nobody can know yet which models there are.
            raise TritonError(Fault.UNREACHABLE, "no repository was read yet").to_gateway()
        raise ModelNotFoundError(f"The model {model_id!r} does not exist.", param="model")

    def _discovered(self, channel: Channel, model_ids: Sequence[str]) -> None:
        """A repository was read and has models not reported before (none at all is news as well)."""
        self._repository_read = True
        for model_id in model_ids:
            if self._replica(model_id, channel) is None:
                self._add_replica(model_id, channel)

    def _replica(self, model_id: str, channel: Channel) -> Replica | None:
        model = self._models.get(model_id)
        return model.replica(channel) if model else None

    def _add_replica(self, model_id: str, channel: Channel) -> Replica:
        model = self._models.setdefault(model_id, _Model(model_id, created=int(time.time())))
        replica = Replica(
            model_id, channel, self._health, self._observer, link=self._new_link(model_id, channel)
        )
        model.replicas.append(replica)
        self._spawn(replica.watch(), f"watch {model_id} on {channel.address}")
        return replica

    def _new_link(self, model_id: str, channel: Channel) -> DeltaLink | None:
        if not self._delta_channel:
            return None
        backoff = Backoff(self._health.backoff_first_s, self._health.backoff_limit_s)
        return DeltaLink(model_id, channel, idle_timeout_s=self._idle_timeout_s, backoff=backoff)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        self._watchers.append(asyncio.create_task(work, name=name))
