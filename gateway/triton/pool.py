"""The real `gateway.upstream.Upstream`: served models on one or more Tritons.

Chooses a replica for each generation and, if it fails before the first token was delivered, another one.
Discovers the models if the configuration names none. Knows nothing of HTTP or tensors.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from gateway.errors import InvalidRequestError, ModelNotFoundError, UpstreamProtocolError
from gateway.generation import Accepted, Delta, Event, Generation
from gateway.tokenization import Tokenization, Tokens
from gateway.triton.admin import ModelControl
from gateway.triton.answering import answer_over_channel, answer_plainly
from gateway.triton.answering import tokenize as tokenize_on
from gateway.triton.backends import Backend, Backends, PoolObserver
from gateway.triton.client import Client
from gateway.triton.discovery import Discovery
from gateway.triton.errors import Fault, TritonError
from gateway.triton.failover import Attempts, TracedCalls
from gateway.triton.replicas import HealthPolicy, Replica, ReplicaReport, ReplicaState
from gateway.triton.resolver import Resolve, resolve
from gateway.upstream import EntriesChanged, ModelCard


class TritonUpstream:
    """Serves models, each of which is one entry in the repository of one or more Tritons.

    Args:
        upstreams: gRPC addresses `host:port`, and names `dns:///host:port`, which stand for a Triton at each
            address that the host currently has.
        models: ids of the models to serve; empty: every entry of a known contract that the Tritons have. A
            model once seen stays listed while its Tritons are down.
        idle_timeout_s: seconds without any response after which a request gives up its replica.
        load_timeout_s: longest load of an entry, and longest wait for requests that delay an unload.
        observer: told of health and errors.
        max_attempts: replicas that one generation may try.
        health: how the replicas are watched.
        repository_key: the key that the Tritons require for listing, loading and unloading, as KEY=VALUE.
        resolve_interval_s: seconds between two lookups of a name while one of its Tritons serves.
        resolve: looks up a name.
    """

    def __init__(
        self,
        *,
        upstreams: Sequence[str],
        models: Sequence[str] = (),
        idle_timeout_s: float = 10.0,
        load_timeout_s: float = 600.0,
        observer: PoolObserver | None = None,
        max_attempts: int = 3,
        health: HealthPolicy | None = None,
        repository_key: str | None = None,
        resolve_interval_s: float = 10.0,
        resolve: Resolve = resolve,
    ) -> None:
        self._configured = tuple(dict.fromkeys(models))
        self._idle_timeout_s = idle_timeout_s
        self._observer = observer
        self._max_attempts = max_attempts
        self._health = health or HealthPolicy()
        self._repository_key = repository_key
        now = int(time.time())
        self._created = dict.fromkeys(self._configured, now)
        """The models to be served, with the Unix time at which each was first seen."""
        self._backends = Backends(
            upstreams,
            make=self._make_backend,
            policy=self._health,
            interval_s=resolve_interval_s,
            resolve=resolve,
            observer=observer,
        )
        self._control = ModelControl(
            self._clients, self._replica, self._add_replica, timeout_s=load_timeout_s
        )
        self._closed = False

    async def start(self) -> None:
        """Connect and begin watching health; returns without waiting for readiness."""
        self._backends.start()

    async def close(self) -> None:
        """Stop watching and close the clients; running generations end with `UnavailableError`."""
        self._closed = True
        await self._backends.close()

    def models(self) -> list[ModelCard]:
        """Return the models to be served, as configured or discovered, by name."""
        return [self._card(model_id) for model_id in self._configured or sorted(self._created)]

    def model(self, model_id: str) -> ModelCard:
        """Return one model.

        Raises:
            ModelNotFoundError: it is not among those.
            UnavailableError: it is unknown, since no model is configured and no Triton was reached yet.
        """
        self._find(model_id)
        return self._card(model_id)

    def replicas(self) -> list[ReplicaReport]:
        """Return all known replicas, by model and upstream."""
        return [replica.describe() for model_id in self._created for replica in self._replicas(model_id)]

    async def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Run `request`: see `gateway.upstream.Upstream.generate`."""
        attempts, calls = self._attempts(request), TracedCalls(request)
        accepted = delivered = generated = False
        while True:
            replica = attempts.next()
            try:
                with calls.to(replica) as (call, asked):
                    async with self._attempt(replica, asked) as events:
                        async for event in events:
                            if type(event) is Delta:
                                delivered = True
                                if not generated and event.tokens:
                                    call.event("first_token")
                                    generated = True
                            elif type(event) is Accepted:
                                call.event("accepted")
                                if accepted:
                                    continue  # from a second replica: the client has the first one's
                                accepted = True
                            yield event
            except TritonError as error:
                replica.suspect(error)
                attempts.failed(error.blame_grammar(request), delivered=delivered)
            else:
                return

    async def tokenize(self, request: Tokenization) -> Tokens:
        """Run `request`: see `gateway.upstream.Upstream.tokenize`."""
        attempts, calls = self._attempts(request), TracedCalls(request)
        while True:
            replica = attempts.next()
            try:
                with calls.to(replica) as (_, asked), replica.in_use():
                    return await self._tokenize(replica, asked)
            except TritonError as error:
                replica.suspect(error)
                attempts.failed(error)

    def _attempts(self, request: Generation | Tokenization) -> Attempts:
        return Attempts(
            lambda: self._find(request.model),
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
        """Refuse a model that is not configured; if models are discovered, any may be controlled."""
        if self._closed or self._configured:
            self._find(model_id)

    @contextlib.asynccontextmanager
    async def _attempt(
        self, replica: Replica, request: Generation
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Run `request` on one replica for a block; yields its events.

        Raises TritonError, or a GatewayError if it was never sent, as do the events.
        """
        dialect, report = replica.serving()
        try:
            with replica.in_use():
                channels = dialect.channels if request.stream else None
                if channels is None:
                    running: AbstractAsyncContextManager[AsyncGenerator[Event, None]] = contextlib.aclosing(
                        answer_plainly(
                            replica.client, dialect, request, report, idle_timeout_s=self._idle_timeout_s
                        )
                    )
                else:
                    running = answer_over_channel(replica.client, replica.channel, channels, request, report)
                async with running as events:
                    yield events
        except UpstreamProtocolError as error:
            raise TritonError(Fault.PROTOCOL, error.message, message=error.message) from error

    async def _tokenize(self, replica: Replica, request: Tokenization) -> Tokens:
        """Run `request` on one replica; raises TritonError, or a GatewayError if it was never sent."""
        dialect, report = replica.serving()
        if dialect.tokenizer is None:
            raise InvalidRequestError("The model's tokenizer cannot be used.", param="model")
        try:
            return await tokenize_on(replica.client, dialect.tokenizer, request, report)
        except UpstreamProtocolError as error:
            raise TritonError(Fault.PROTOCOL, error.message, message=error.message) from error

    def _find(self, model_id: str) -> list[Replica]:
        """Return the current replicas of a model that is to be served; there may be none."""
        if self._closed:
            raise TritonError(Fault.CLOSED, "the pool was closed").to_gateway()
        if model_id in self._created:
            return self._replicas(model_id)
        if not self._configured and not any(backend.listed for backend in self._backends.present()):
            # It is not known yet which models there are.
            raise TritonError(Fault.UNREACHABLE, "no repository was read yet").to_gateway()
        raise ModelNotFoundError(f"The model {model_id!r} does not exist.", param="model")

    def _card(self, model_id: str) -> ModelCard:
        replicas = self._replicas(model_id)
        ready = any(replica.state is ReplicaState.READY for replica in replicas)
        wanted = any(replica.wanted for replica in replicas)
        reports = [replica.report for replica in replicas if replica.report is not None]
        return ModelCard(
            id=model_id,
            ready=ready,
            created=self._created[model_id],
            max_context=min((report.max_context for report in reports), default=None),
            unloaded=bool(replicas) and not ready and not wanted,
            chat_format=reports[0].chat_format if reports else None,
        )

    def _replicas(self, model_id: str) -> list[Replica]:
        return [
            backend.replicas[model_id] for backend in self._backends.present() if model_id in backend.replicas
        ]

    def _clients(self) -> list[Client]:
        return [backend.client for backend in self._backends.present()]

    def _make_backend(self, address: str) -> Backend:
        client = Client(address, repository_key=self._repository_key)
        backend = Backend(
            client,
            self._health,
            idle_timeout_s=self._idle_timeout_s,
            observer=self._observer,
            changed=self._backends.lost_health,
        )
        for model_id in self._configured:
            backend.add(model_id)
        if not self._configured:
            discovery = Discovery(client, self._health, self._discovered)
            backend.spawn(discovery.watch(), f"discover on {address}")
        return backend

    def _discovered(self, client: Client, model_ids: Sequence[str]) -> None:
        """A repository was read; `model_ids` are models not reported before, perhaps none."""
        backend = self._backends.of(client)
        if backend is None:
            return
        backend.listed = True
        for model_id in model_ids:
            if model_id not in backend.replicas:
                self._add_replica(model_id, client)
        self._forget_models()

    def _forget_models(self) -> None:
        """Forget models whose Tritons have left, once all other repositories were read."""
        backends = self._backends.present()
        if all(backend.listed for backend in backends):
            self._created = {
                model_id: created for model_id, created in self._created.items() if self._replicas(model_id)
            }

    def _replica(self, model_id: str, client: Client) -> Replica | None:
        backend = self._backends.of(client)
        return backend.replicas.get(model_id) if backend else None

    def _add_replica(self, model_id: str, client: Client) -> Replica:
        backend = self._backends.of(client)
        if backend is None:
            raise TritonError(Fault.UNREACHABLE, "this Triton is gone")
        self._created.setdefault(model_id, int(time.time()))
        return backend.add(model_id)
