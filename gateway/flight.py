"""One request for text between its client and the upstream.

A running generation is a race of the upstream's next event against the client's hang-up, the deadline and
the end of a drain; the first to happen ends the others. Knows nothing of JSON or server-sent events.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, TypeVar

from msgspec.structs import replace

from gateway.admission import Admission
from gateway.batch import together
from gateway.errors import (
    ClientGoneError,
    DeadlineError,
    GatewayError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.exchange import Exchange
from gateway.generation import Accepted, Event, Generation
from gateway.resources import Gateway

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

_REJECTED = {RateLimitError: "queue_full", DeadlineError: "deadline", UnavailableError: "draining"}


class Flight(AsyncIterator[Event]):
    """Runs generations (`start`, then iterate over the events after `Accepted`), or one call (`call`).

    Everything it holds (permit, upstream call, watcher) is released with the exchange's resources.
    """

    def __init__(self, gateway: Gateway, exchange: Exchange) -> None:
        self._gateway = gateway
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._error: GatewayError | None = None
        self._over = False
        self._waiting: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def end(self, error: GatewayError) -> None:
        """End the flight with `error`, cancelling whatever it waits for; only the first call has an effect.

        Does nothing once the last event was taken, since servers report a hang-up after every whole answer.
        """
        if self._over or self._error is not None:
            return
        self._error = error
        self._exchange.fail(error)
        if self._waiting is not None:
            self._waiting.cancel()

    async def start(self, generations: Sequence[Generation], receive: Receive) -> Accepted:
        """Wait for admission and for the upstream to accept; once it has, status 200 may be sent.

        Args:
            generations: one for each prompt; their events come as one stream (see `gateway.batch`).
            receive: the request's ASGI channel, which reports the client's hang-up; the body was read.

        Raises:
            GatewayError: a queue is full, the deadline passed, the client hung up, the gateway is shutting
                down, or the upstream refused.
        """
        # A choice costs the upstream as much as a request.
        await self._enter(receive, permits=sum(generation.n for generation in generations))
        self._check()  # a flight that ended while it waited is not sent upstream
        generate, first, *more = self._gateway.upstream.generate, *map(self._bounded, generations)
        source = together(generate, [first, *more]) if more else generate(first)
        self._next = source.__anext__
        self._exchange.resources.push_async_callback(source.aclose)
        try:
            event = await anext(self)
        except StopAsyncIteration:
            event = None
        if not isinstance(event, Accepted):
            raise UpstreamProtocolError("The upstream began an answer without accepting the request.")
        return event

    async def call(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        receive: Receive,
        *,
        admission: Admission | None = None,
    ) -> T:
        """Wait for admission, then for `work`, which returns the whole answer; ending the flight cancels it.

        Args:
            work: makes the call to the upstream.
            receive: as for `start`.
            admission: grants the permit; None: the one for generations.

        Raises:
            GatewayError: as for `start`.
        """
        await self._enter(receive, permits=1, admission=admission)
        self._check()  # as in `start`
        answer = await self._race(work())
        self._over = True
        return answer

    def __aiter__(self) -> "Flight":
        return self

    async def __anext__(self) -> Event:
        # `_race`, written out: it is on the way of every token.
        if self._error is not None:
            raise self._error
        exchange = self._exchange
        task = self._waiting = asyncio.current_task()
        if task is None:
            raise RuntimeError("a flight waits inside a task")
        others = task.cancelling()
        began = perf_counter()
        try:
            event = await self._next()
        except StopAsyncIteration:
            self._over = True
            raise
        except asyncio.CancelledError:
            self._raise_end(task, others)
            raise
        finally:
            self._waiting = None
            exchange.waited_s += perf_counter() - began
        exchange.observe(event)
        return event

    async def stop_watching(self) -> None:
        """Stop watching for the client's hang-up: from now on, whoever streams the answer notices it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None

    async def _enter(self, receive: Receive, *, permits: int, admission: Admission | None = None) -> None:
        """Start everything that can end the flight, and wait for admission."""
        exchange, gateway = self._exchange, self._gateway
        admission = admission or gateway.admission
        exchange.generates = admission is gateway.admission
        exchange.resources.callback(self._forget_error)
        gateway.drain.register(self.end)
        exchange.resources.callback(gateway.drain.unregister, self.end)
        deadline = self._loop.call_at(exchange.deadline, self.end, _too_late())
        exchange.resources.callback(deadline.cancel)
        self._watcher = self._loop.create_task(self._watch(receive))
        exchange.resources.push_async_callback(self.stop_watching)
        self._charge_key(permits)
        await self._admit(admission, permits)

    def _charge_key(self, answers: int) -> None:
        """Count the request against the limits of its key.

        Raises:
            RateLimitError: the key is at one of them.
        """
        exchange = self._exchange
        use = self._gateway.key_limits.use_of(exchange.key_name)
        if use is None:
            return
        try:
            taken = use.begin(answers)
        except RateLimitError:
            exchange.metrics.rejected.labels(exchange.model, "key_limit").inc()
            raise
        exchange.resources.callback(lambda: use.end(taken, exchange.tokens))

    async def _admit(self, admission: Admission, permits: int) -> None:
        metrics, model = self._gateway.metrics, self._exchange.model
        # The gauges count generations only, not tokenizations, which have an admission of their own.
        counts = self._exchange.generates
        metrics.waiting.labels(model).inc(counts)
        began = perf_counter()
        try:
            with self._exchange.trace.part("admission"):
                taken = await self._race(admission.acquire(permits))
        except tuple(_REJECTED) as error:
            metrics.rejected.labels(model, _REJECTED[type(error)]).inc()
            raise
        finally:
            self._exchange.queued_s = perf_counter() - began
            metrics.waiting.labels(model).dec(counts)
        self._exchange.resources.callback(admission.release, permits)
        metrics.in_flight.labels(model).inc(taken * counts)
        self._exchange.resources.callback(metrics.in_flight.labels(model).dec, taken * counts)

    def _bounded(self, generation: Generation) -> Generation:
        """Return `generation` with the configured limit on new tokens if its client set none."""
        bound = self._gateway.settings.default_max_tokens
        if bound is None or generation.max_tokens is not None or generation.max_total_tokens is not None:
            return generation
        return replace(generation, max_tokens=max(bound, generation.min_tokens), max_tokens_yields=True)

    async def _race(self, step: Awaitable[T]) -> T:
        """Await `step`; if `end` is called first, cancel it and raise the error given to `end`."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a flight waits inside a task")
        others = task.cancelling()
        self._waiting = task
        began = perf_counter()
        try:
            return await step
        except asyncio.CancelledError:
            self._raise_end(task, others)
            raise
        finally:
            self._waiting = None
            self._exchange.waited_s += perf_counter() - began

    def _raise_end(self, task: asyncio.Task[Any], others: int) -> None:
        """Raise the error given to `end` if that cancelled `task`, and nobody else did at the same time."""
        if self._error is not None and task.uncancel() <= others:
            raise self._error from None

    def _check(self) -> None:
        """Raise if the flight was ended while it was not waiting for anything."""
        if self._error is not None:
            raise self._error

    def _forget_error(self) -> None:
        """Drop the error, whose traceback refers back to this object; see `Exchange.forget_error`."""
        self._over, self._error = True, None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGoneError("The client hung up."))


def _too_late() -> DeadlineError:
    return DeadlineError("The request took longer than this gateway allows.")
