"""The real `gateway.core.upstream.Upstream`: served models on one or more Tritons.

Chooses a replica for each request and, if it fails before the first token was delivered, another one. An
answer that was begun is resumed there, if both models can: the next replica gets the tokens that the client
has. Each attempt is a call in the trace of the HTTP request. Knows nothing of HTTP or tensors.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec import structs
from opentelemetry.trace import Span

from gateway.core.batch import choices_apart
from gateway.core.events import Accepted, Delta, Event, Heartbeat
from gateway.core.request import Generation
from gateway.core.upstream import Embedding, EntriesChanged, ModelCard, Tokenization, Tokens, Vector
from gateway.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from gateway.telemetry.tracing import Headers
from gateway.triton.admin import ModelControl
from gateway.triton.attempts import Attempts
from gateway.triton.backends import Backends
from gateway.triton.client import Client, remaining_s
from gateway.triton.dialects.base import AnswerDecoder, Dialect, ModelReport
from gateway.triton.errors import Fault, TritonError
from gateway.triton.on_demand import LEFT_S, OnDemand
from gateway.triton.options import PoolOptions
from gateway.triton.replicas import Replica, ReplicaState, unable

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOGGED_LIMIT = 2000
"""How many characters of an upstream's error text are logged."""
_SILENCE_S = 120.0
"""How long a stream of a model without heartbeats may be silent: it may wait, or be in prefill."""
_END_WAIT_S = 0.2
"""How long a backend may take to end an answer of which nothing more is needed."""
_ATTEMPTS_LIMIT = 3
"""How many replicas one request may try, until one has accepted it."""
_RESUMES_LIMIT = 3
"""How often one answer is resumed: a request that its servers die of must not take down many."""
_PAUSE_S = 0.25
"""Between two looks for a replica: where a model that has none starts, or an answer can be resumed."""
_UNLOADED = {Fault.NOT_READY, Fault.UNLOADED}
"""Faults of a request whose model was unloaded meanwhile."""
_DOWN = {ReplicaState.UNREACHABLE, ReplicaState.STUCK}
_LOOK_WITHIN_S = 2.0
"""How long a request waits for a look at its model, if none of its Tritons is known to serve it."""
_LOOKED_POLL_S = 0.05


class TritonUpstream:
    """Serves models, each of which is one entry in the repository of one or more Tritons.

    Args:
        upstreams: gRPC addresses `host:port`, and names `dns:///host:port`, which stand for a Triton at each
            address that the host currently has.
        options: how they are served.
    """

    def __init__(self, upstreams: Sequence[str], options: PoolOptions) -> None:
        self._options = options
        self._backends = Backends(upstreams, options)
        self._control = ModelControl(self._backends, options)
        policy = options.on_demand
        self._on_demand = None if policy is None else OnDemand(self._backends, self._control, policy)
        self._closed = False
        self.running = 0
        """Number of calls for clients that have not ended, those that wait for their model among them."""

    async def start(self) -> None:
        """Connect and begin watching health; returns without waiting for readiness."""
        self._backends.start()
        if self._on_demand is not None:
            self._on_demand.start()

    async def close(self) -> None:
        """Stop watching and close the clients; running requests end with `UnavailableError`."""
        self._closed = True
        if self._on_demand is not None:
            await self._on_demand.close()
        await self._backends.close()

    async def reached(self, deadline: float) -> None:  # noqa: D102 - inherited
        clock = asyncio.get_running_loop().time
        until = min(clock() + self._options.upstream_wait_s, deadline - LEFT_S)
        while not (self._knows_models() or self._closed) and clock() < until:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_PAUSE_S)

    async def met(self, model_id: str, deadline: float) -> None:  # noqa: D102 - inherited
        with self._in_use():
            async for _ in self._absence(model_id, deadline, self._options.upstream_wait_s):
                pass

    def models(self) -> list[ModelCard]:
        """Return the models to be served, as configured or, by name, as discovered."""
        models = self._backends.models()
        return [
            self._card(model_id, models[model_id])
            for model_id in (models if self._options.models else sorted(models))
        ]

    def model(self, model_id: str) -> ModelCard:
        """Return one model.

        Raises:
            ModelNotFoundError: it is not among those.
            UnavailableError: it is unknown, since no model is configured and no Triton was reached yet.
        """
        self._find(model_id)
        return self._card(model_id, self._backends.models()[model_id])

    def replicas(self) -> list[Replica]:
        """Return all replicas of the models to be served, by model."""
        return [each for model_id in self._backends.models() for each in self._backends.replicas(model_id)]

    async def generate(self, request: Generation) -> AsyncGenerator[Event, None]:  # noqa: D102 - inherited
        attempts = Attempts(request, self._options.upstream_wait_s)
        generated = False
        with self._in_use():
            while not attempts.complete:
                async for _ in self._waiting(attempts):
                    yield Heartbeat()
                with self._attempt(attempts) as (replica, call, headers):
                    async with await self._events(replica, request, attempts, headers) as events:
                        async for event in events:
                            if type(event) is Delta:
                                # Logits that come again take the place of the first ones.
                                if not (attempts.delivered or request.logits):
                                    attempts.delivered = request.stream or not event.counts_only
                                replica.on_trial = False
                                if not generated and event.tokens:
                                    call.add_event("first_token")
                                    generated = True
                            elif type(event) is Accepted:
                                call.add_event("accepted")
                                if not attempts.accept():
                                    self._resumed(attempts)
                                    continue  # from a second replica: the client has the first one's
                                if attempts.whole:
                                    yield replace(event, whole=True)
                                    continue
                            yield event
                    return

    async def tokenize(self, request: Tokenization) -> Tokens:  # noqa: D102 - inherited

        async def ask(replica: Replica, headers: Headers) -> Tokens:
            dialect, report = replica.serving()
            if dialect.tokens is not None and report.chat_format is None:
                return await asyncio.to_thread(dialect.tokens, request)
            if dialect.tokenizer is None:
                raise InvalidRequestError("The model's tokenizer cannot be used.", param="model")
            sent = dialect.tokenizer.request(request, report, remaining_s(request.deadline))
            responses = await replica.client.infer(sent, deadline=request.deadline, headers=headers)
            return dialect.tokenizer.read(request, responses)

        return await self._call(request, ask)

    async def embed(self, request: Embedding) -> Vector:  # noqa: D102 - inherited

        async def ask(replica: Replica, headers: Headers) -> Vector:
            embedder = replica.serving()[0].embedder
            if embedder is None:
                raise InvalidRequestError("The model does not embed.", param="model")
            sent = embedder.request(request)
            responses = await replica.client.infer(sent, deadline=request.deadline, headers=headers)
            vector = embedder.read(request, responses)
            replica.on_trial = False
            return vector

        return await self._call(request, ask)

    async def _call(
        self, request: Tokenization | Embedding, ask: Callable[[Replica, Headers], Awaitable[T]]
    ) -> T:
        """Return what `ask` returns, which runs `request` on a replica."""
        attempts = Attempts(request, self._options.upstream_wait_s)
        with self._in_use():
            while True:
                async for _ in self._waiting(attempts):
                    pass
                with self._attempt(attempts) as (replica, _, headers):
                    return await ask(replica, headers)

    async def load(self, model_id: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """Load a model: see `gateway.core.upstream.Upstream.load`."""
        self._check_controllable(model_id)
        with self._in_use():
            return await self._control.load(model_id, reload=reload, upstream=upstream)

    async def unload(self, model_id: str, *, upstream: str | None) -> list[EntriesChanged]:
        """Unload a model: see `gateway.core.upstream.Upstream.unload`."""
        self._check_controllable(model_id)
        with self._in_use():
            return await self._control.unload(model_id, upstream=upstream)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def _waiting(self, attempts: Attempts) -> AsyncGenerator[None, None]:
        """Yield about every second while a request waits: for a Triton to start, or its model to be loaded.

        Also while there is no replica where an answer that was begun can be resumed.

        Raises:
            GatewayError: the model cannot be loaded, or not in time, is not to be served, or was unloaded.
        """
        request, clock = attempts.request, asyncio.get_running_loop().time
        begun = clock()
        if attempts.tried and not attempts.able(self._find(request.model)):
            await asyncio.sleep(_PAUSE_S)  # in which probes tell what has become of those that failed
            attempts.tried.clear()  # they may be asked again
        async with contextlib.aclosing(self._coming(attempts, begun)) as waits:
            async for _ in waits:
                yield
        while attempts.started:
            replicas = self._find(request.model)
            if attempts.able(replicas):
                return
            attempts.tried.clear()  # after a pause, those that failed may be asked again
            unloaded = replicas and all(each.state is ReplicaState.UNLOADED for each in replicas)
            if unloaded or clock() >= request.deadline:
                raise (attempts.failure or unable(replicas)).to_gateway(request)
            await asyncio.sleep(_PAUSE_S)
            yield

    async def _coming(self, attempts: Attempts, begun: float) -> AsyncGenerator[None, None]:
        """Yield until a Triton has the model, and has loaded it if that is on demand; waits since `begun`."""
        request, clock = attempts.request, asyncio.get_running_loop().time
        while True:
            async for _ in self._absence(request.model, request.deadline, attempts.wait_s):
                yield
            attempts.wait_s = max(attempts.wait_s - (clock() - begun), 0.0)
            if self._on_demand is None:
                return
            try:
                loading = self._on_demand.loading(request.model, request.deadline)
                async with contextlib.aclosing(loading) as waits:
                    async for _ in waits:
                        yield
            except UnavailableError:
                begun = clock()
                if not await self._has_gone(attempts):
                    raise
            else:
                return

    async def _has_gone(self, attempts: Attempts) -> bool:
        """Whether no Triton is left that could load a model, and the request may wait until one is back."""
        model_id, clock = attempts.request.model, asyncio.get_running_loop().time
        until = attempts.request.deadline - LEFT_S
        if attempts.wait_s:
            await self._look(model_id, min(clock() + _LOOK_WITHIN_S, until))
        return attempts.wait_s > 0 and clock() < until and self._is_absent(model_id)

    async def _absence(self, model_id: str, deadline: float, wait_s: float) -> AsyncGenerator[None, None]:
        """Yield now and then while a request waits for a Triton that has the model, for `wait_s` at most.

        Raises:
            GatewayError: the model is not to be served.
        """
        clock = asyncio.get_running_loop().time
        if self._on_demand is None:
            await self._look(model_id, min(clock() + _LOOK_WITHIN_S, deadline - LEFT_S))
        until = min(clock() + wait_s, deadline - LEFT_S)
        while self._is_absent(model_id) and clock() < until:
            await asyncio.sleep(_PAUSE_S)
            yield

    def _knows_models(self) -> bool:
        """Whether models are configured, or a repository was read."""
        return bool(self._options.models) or any(backend.listed for backend in self._backends.present())

    async def _look(self, model_id: str, until: float) -> None:
        """Have a model that is not ready probed: another process may just have had it loaded."""
        replicas = self._find(model_id)
        if _any_ready(replicas):
            return
        looks = [each.look_now() for each in replicas if each.state not in _DOWN]
        while not (_any_ready(replicas) or all(look.is_set() for look in looks)):
            if asyncio.get_running_loop().time() >= until:
                return
            await asyncio.sleep(_LOOKED_POLL_S)

    def _resumed(self, attempts: Attempts) -> None:
        """Count that another replica accepted the request, if that goes on with an answer."""
        if attempts.started:
            attempts.resumes += 1
            self._options.metrics.resumes.labels(attempts.model).inc()

    def _is_absent(self, model_id: str) -> bool:
        """Whether a model has no Triton, or all of its Tritons are down or loading it.

        Those from which it was unloaded on purpose do not count, unless that is all of them.

        Raises:
            GatewayError: as `_find`.
        """
        states = {replica.state for replica in self._find(model_id)}
        if self._on_demand is not None:  # which sees to what a Triton has not loaded
            return states <= {ReplicaState.UNKNOWN, *_DOWN}
        return ReplicaState.READY not in states and states != {ReplicaState.UNLOADED}

    def _check_controllable(self, model_id: str) -> None:
        """Refuse a model that is not configured; if models are discovered, any may be controlled."""
        if self._closed or self._options.models:
            self._find(model_id)

    @contextlib.contextmanager
    def _attempt(self, attempts: Attempts) -> Iterator[tuple[Replica, Span, Headers]]:
        """Choose a replica that has not failed yet, for a block; yields it, and what `Attempts.call` does.

        The block is left quietly if the call fails and another attempt may be made.

        Raises:
            GatewayError: none is ready, there cannot be any, or the last attempt failed.
        """
        # Looked up for each attempt: the pool may have been closed meanwhile.
        replicas = self._find(attempts.request.model)
        replica = attempts.choose(replicas)
        if replica is None:
            raise unable(replicas).to_gateway()
        try:
            with attempts.call(replica) as (call, headers), replica.in_use():
                yield replica, call, headers
        except TritonError as error:
            down = replica.suspect(error)
            self._failed(attempts, replica, error, down=down)

    def _failed(self, attempts: Attempts, replica: Replica, error: TritonError, *, down: bool) -> None:
        """Record that an attempt failed; return if another one may be made, perhaps after a wait.

        `down`: the replica may be down, so that the request may wait as those that come later do.

        Raises:
            GatewayError: it was the last attempt.
        """
        treatment, request = error.fault.value, attempts.request
        attempts.failure = error
        if treatment.upstream_at_fault:
            errors = self._options.metrics.upstream_errors
            errors.labels(attempts.model, replica.upstream, treatment.code).inc()
            extra = {"request_id": request.request_id, "model": attempts.model, "upstream": replica.upstream}
            extra["detail"] = error.detail[:_LOGGED_LIMIT]
            _log.warning("upstream failed: %s", treatment.code, extra=extra)
        if self._on_demand is not None and not attempts.delivered and error.fault in _UNLOADED:
            return  # to make room for another model, perhaps by another gateway
        if not treatment.same_replica:
            attempts.tried.append(replica)
        if attempts.complete:
            return  # only the end of the call failed
        if attempts.started and treatment.failover and attempts.resumes < _RESUMES_LIMIT:
            return
        elsewhere = attempts.able(self._find(request.model))
        another = len(attempts.called) < _ATTEMPTS_LIMIT and (elsewhere or (down and attempts.wait_s > 0))
        if attempts.started or attempts.delivered or not treatment.failover or not another:
            raise error.to_gateway(request) from error

    async def _events(
        self, replica: Replica, request: Generation, attempts: Attempts, headers: Headers
    ) -> contextlib.AbstractAsyncContextManager[AsyncGenerator[Event, None]]:
        """Return a block around the events of `request`, as it is or resumed, on one replica.

        Raises TritonError, UpstreamProtocolError, or a GatewayError if it was never sent, as do the events.
        """
        dialect, report = replica.serving()
        if request.adapter is not None and not dialect.adapters:
            raise InvalidRequestError("The model's backend applies no adapters by name.", param="model")
        attempts.whole = request.stream and (request.beam_width > 1 or not dialect.streams)
        if request.stream and not dialect.streams:
            request = structs.replace(request, stream=False)
        if request.logits and report.vocabulary is None:
            raise InvalidRequestError("The model's backend reports no logits.", param="model")
        if dialect.prepare is not None:
            request = await dialect.prepare(request, report)
        resumes = self._options.resume and not request.logits
        request, decoder = attempts.next(request, dialect.channels if resumes else None, report)
        if request.stream and dialect.channels is not None:
            return replica.channel.answer(
                dialect.channels, request, report, headers, decoder=decoder, cancel=dialect.cancel
            )
        idle_timeout_s = self._options.idle_timeout_s
        if not dialect.heartbeats:  # and what does not stream comes when all of it was written
            idle_timeout_s = _SILENCE_S if request.stream else math.inf

        def events(asked: Generation) -> AsyncGenerator[Event, None]:
            call = replica.client, dialect, asked, report, decoder
            return _plain_events(*call, headers=headers, idle_timeout_s=idle_timeout_s)

        several = request.n > 1 and not dialect.choices
        return contextlib.aclosing(choices_apart(events, request) if several else events(request))

    def _find(self, model_id: str) -> list[Replica]:
        """Return the current replicas of a model that is to be served; there may be none.

        Raises:
            ModelNotFoundError: it is not to be served.
            UnavailableError: the pool was closed, or it is not known yet which models there are.
        """
        if self._closed:
            raise TritonError(Fault.CLOSED, "the pool was closed").to_gateway()
        if model_id in self._backends.models():
            return self._backends.replicas(model_id)
        if not self._knows_models():
            raise TritonError(Fault.UNREACHABLE, "no repository was read yet").to_gateway()
        raise ModelNotFoundError.of(model_id)

    def _card(self, model_id: str, created: int) -> ModelCard:
        replicas = self._backends.replicas(model_id)
        ready = _any_ready(replicas)
        on_demand = self._on_demand is not None
        wanted = any(replica.state in _DOWN if on_demand else replica.wanted for replica in replicas)
        reports = [replica.report for replica in replicas if replica.report is not None]
        contexts = [report.max_context for report in reports if report.max_context is not None]
        return ModelCard(
            id=model_id,
            ready=ready,
            created=created,
            max_context=min(contexts, default=None),
            unloaded=bool(replicas) and not ready and not wanted,
            chat_format=reports[0].chat_format if reports else None,
            vocabulary=reports[0].vocabulary if reports else None,
            template_reads=reports[0].template_reads if reports else frozenset(),
        )


def _any_ready(replicas: Sequence[Replica]) -> bool:
    return any(replica.state is ReplicaState.READY for replica in replicas)


async def _plain_events(
    client: Client,
    dialect: Dialect,
    request: Generation,
    report: ModelReport,
    decoder: AnswerDecoder | None,
    *,
    headers: Headers,
    idle_timeout_s: float,
) -> AsyncGenerator[Event, None]:
    """Run `request` with all of its answer on its own stream; `decoder` reads it, if there is one already."""
    decoder = decoder or dialect.decoder(request, report)
    responses = client.stream_infer(
        dialect.request(request, report, remaining_s(request.deadline)),
        deadline=request.deadline,
        idle_timeout_s=idle_timeout_s,
        headers=headers,
        cancel=dialect.cancel,
    )
    async with contextlib.aclosing(responses):
        async for response in responses:
            for event in decoder.decode(response):
                yield event
            if decoder.over:
                # The backend may end here, too: cancelled at that moment, its model may never be unloaded.
                with contextlib.suppress(TimeoutError, TritonError):
                    async with asyncio.timeout(_END_WAIT_S):
                        async for _ in responses:
                            pass
                break  # which cancels the rest
    for event in await asyncio.to_thread(decoder.end) if dialect.counts_at_end else decoder.end():
        yield event
