"""One request for text between its client and the upstream.

A running generation is a race: the upstream's next word against the client's hang-up, the deadline and the
end of a drain. Whichever comes first ends the others. Knows nothing of JSON or server-sent events.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

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
    """Runs generations: `start`, then iterate over what follows `Accepted`; or `call`, for one answer.

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
        """End the flight with `error`: what it waits for is cancelled. The first caller wins.

        Nothing happens once the last event was taken: servers report a hang-up after every whole answer.
        """
        if self._over or self._error is not None:
            return
        self._error = error
        self._exchange.fail(error)
        if self._waiting is not None:
            self._waiting.cancel()

    async def start(self, generations: Sequence[Generation], receive: Receive) -> Accepted:
        """Wait for admission and for the upstream's acceptance: from here the client may be told 200.

        Args:
            generations: what to run, one for each prompt; told as one (see `gateway.batch`).
            receive: the request's ASGI channel, its body read: the client's hang-up comes from there.

        Raises:
            GatewayError: full, late, hung up, shutting down, or refused by the upstream.
        """
        # A choice costs the upstream as much as a request.
        await self._enter(receive, permits=sum(generation.n for generation in generations))
        self._check()  # what was over while it waited never goes upstream
        generate, first, *more = self._gateway.upstream.generate, *map(self._bounded, generations)
        self._source = together(generate, [first, *more]) if more else generate(first)
        self._exchange.resources.push_async_callback(self._source.aclose)
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
        """Wait for admission and then for `work`, which answers as a whole; what ends the race cancels it.

        Args:
            work: asks the upstream.
            receive: as for `start`.
            admission: who lets it in; None: whoever lets generations in.

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
        self._check()
        try:
            event = await self._race(anext(self._source))
        except StopAsyncIteration:
            self._over = True
            raise
        self._exchange.observe(event)
        return event

    async def stop_watching(self) -> None:
        """Leave the watch for the client's hang-up to whoever streams the answer."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None

    async def _enter(self, receive: Receive, *, permits: int, admission: Admission | None = None) -> None:
        """Begin the race, and wait for a place in it."""
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
        """Count the request among those of its key, which may be at one of its bounds."""
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
        # The gauges are of generations, and of their places: tokenizations have others.
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
        """Return `generation` with our own bound on new tokens, where its client set none."""
        bound = self._gateway.settings.default_max_tokens
        if generation.max_tokens is not None or bound is None:
            return generation
        return replace(generation, max_tokens=max(bound, generation.min_tokens), max_tokens_yields=True)

    async def _race(self, step: Awaitable[T]) -> T:
        """Wait for `step`, unless `end` comes first: then it is cancelled, and the end's error raised."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a flight waits inside a task")
        others = task.cancelling()
        self._waiting = task
        began = perf_counter()
        try:
            return await step
        except asyncio.CancelledError:
            # Ours only if `end` asked for it and nobody else did at the same time.
            if self._error is not None and task.uncancel() <= others:
                raise self._error from None
            raise
        finally:
            self._waiting = None
            self._exchange.waited_s += perf_counter() - began

    def _check(self) -> None:
        """Raise if the race was decided while nothing was being waited for."""
        if self._error is not None:
            raise self._error

    def _forget_error(self) -> None:
        """Let go of the error, whose traceback leads back here: see `Exchange.forget_error`."""
        self._over, self._error = True, None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGoneError("The client hung up."))


def _too_late() -> DeadlineError:
    return DeadlineError("The request took longer than this gateway allows.")
