"""One request for text between its client and the upstream.

A running generation is a race of the upstream's next event against the client's hang-up, the deadline and
the end of a drain; the first to happen ends the others. Also checks what depends on a prompt's length, which
the upstream tells. Knows nothing of JSON or server-sent events.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, TypeVar

from msgspec.structs import replace

from gateway.core.batch import together
from gateway.core.events import Accepted, Event, Heartbeat
from gateway.core.request import Generation
from gateway.core.upstream import ModelCard
from gateway.errors import (
    ClientGoneError,
    ContextLengthError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.http.record import Gateway, RequestRecord
from gateway.limits.admission import Admission

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

_REJECTED = {RateLimitError: "queue_full", DeadlineError: "deadline", UnavailableError: "draining"}

PROMPT_LOGPROBS_LIMIT = 2**20
"""Log-probabilities of prompts in one answer: up to some 64 MiB of JSON, and several times that in memory."""


def check_limits(gateway: Gateway, record: RequestRecord, admission: Admission) -> None:
    """Refuse a request, before its body is read, that would be refused afterwards as things are now.

    Nothing is taken: a request is charged and admitted once it is known what it asks for.

    Raises:
        RateLimitError: its key is at a limit, or `admission` has no place left, not even to wait.
    """
    use = gateway.key_limits.use_of(record.key_name)
    reason = "key_limit"
    try:
        if use is not None:
            use.check()
        reason = "queue_full"
        admission.check()
    except RateLimitError as error:
        if use is not None and reason == "queue_full":
            use.refused()
        served = gateway.models(record.key_name)
        if len(served) == 1:
            record.model = served[0].id
        record.rejected(error, reason)
        raise


def check_prompt_length(accepted: Accepted, card: ModelCard) -> None:
    """Refuse prompts that are longer together than is set for `card`'s model.

    Raises:
        ContextLengthError: they are.
    """
    limit = card.settings.limits.max_prompt_tokens
    if limit is not None and accepted.prompt_tokens > limit:
        raise ContextLengthError(  # in the words by which clients know it
            f"This model's maximum context length is {limit} tokens, as this gateway allows for a prompt."
            f" However, the prompt has {accepted.prompt_tokens} tokens."
        )


def check_prompt_logprobs(generations: Sequence[Generation], accepted: Accepted) -> None:
    """Refuse to report more of the prompts than an answer can have: each choice repeats its prompt's report.

    The generations are alike except for their prompts.

    Raises:
        InvalidRequestError: it would be more than PROMPT_LOGPROBS_LIMIT.
    """
    first = generations[0]
    if first.prompt_logprobs is None:
        return
    reported = accepted.prompt_tokens * first.n * (1 + first.prompt_logprobs)
    if reported > PROMPT_LOGPROBS_LIMIT:
        raise InvalidRequestError(
            f"This answer would report {reported} log-probabilities of prompts (tokens, times choices, "
            f"times alternatives and one), and one answer may report {PROMPT_LOGPROBS_LIMIT}.",
            param="prompt_logprobs" if first.prompt_ranks else "logprobs",
        )


class RunningRequest(AsyncIterator[Event]):
    """Runs generations (`start`, then iterate over the events after `Accepted`), or one call (`call`).

    Everything it holds (permit, upstream call, watcher) is released with the record's resources.
    """

    def __init__(self, gateway: Gateway, record: RequestRecord) -> None:
        self._gateway = gateway
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._error: GatewayError | None = None
        self._over = False
        self._card: ModelCard
        self._waiting: asyncio.Task[Any] | None = None
        self._taken = 0
        """Permits held, of those that the gauges count."""
        self._model_wait: ExitStack | None = None
        """What ends the request's wait for its model to be loaded."""
        self._watcher: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Accepted] | None = None

    def end(self, error: GatewayError) -> None:
        """End the request with `error`, cancelling whatever it waits for; only the first call has an effect.

        Does nothing once the last event was taken, since servers report a hang-up after every whole answer.
        """
        if self._over or self._error is not None:
            return
        self._error = error
        self._record.fail(error)
        if self._waiting is not None:
            self._waiting.cancel()

    async def reached(self, receive: Receive) -> None:
        """Wait until it is known which models there are.

        Raises:
            GatewayError: the deadline passed, the client hung up, or the gateway is shutting down.
        """
        self._begin(receive)
        await self._race(self._gateway.upstream.reached(self._record.deadline))

    async def met(self, model_id: str) -> None:
        """Wait, after `reached`, until a Triton has told what a model is.

        Raises:
            GatewayError: as for `reached`, or the model is not served.
        """
        await self._race(self._gateway.upstream.met(model_id, self._record.deadline))

    async def start(
        self,
        generations: Sequence[Generation],
        receive: Receive,
        *,
        patience_s: float | None = None,
        logits_bytes: int = 0,
    ) -> Accepted | None:
        """Wait for admission and for the upstream to accept; once it has, status 200 may be sent.

        Args:
            generations: one for each prompt; their events come as one stream (see `gateway.core.batch`).
            receive: the request's ASGI channel, which reports the client's hang-up; the body was read.
            patience_s: how long to wait. Then None is returned, and `accepted` waits for the rest; None:
                until the end.
            logits_bytes: what the logits that they report take; waits until there is room for them.

        Raises:
            GatewayError: a queue is full, the deadline passed, the client hung up, the gateway is shutting
                down, or the upstream refused.
        """
        self._starting = self._loop.create_task(self._start(generations, receive, logits_bytes))
        self._record.resources.push_async_callback(self._stop_starting)
        done, _ = await asyncio.wait({self._starting}, timeout=patience_s)
        return await self._starting if done else None

    async def accepted(self) -> Accepted:
        """Wait, after `start`, for the upstream to accept.

        Raises:
            GatewayError: as for `start`.
        """
        assert self._starting is not None  # noqa: S101 - the caller's duty
        return await self._starting

    async def _start(
        self, generations: Sequence[Generation], receive: Receive, logits_bytes: int
    ) -> Accepted:
        self._card = self._gateway.upstream.model(generations[0].model)
        # A choice, or a beam, costs the upstream as much as a request.
        await self._enter(receive, permits=sum(generation.sequences for generation in generations))
        if logits_bytes:
            await self._race(self._gateway.logits.acquire(logits_bytes))
            self._record.answer.callback(self._gateway.logits.release, logits_bytes)
        generate, first, *more = self._gateway.upstream.generate, *map(self._bounded, generations)
        source = together(generate, [first, *more]) if more else generate(first)
        self._next = source.__anext__
        self._record.resources.push_async_callback(source.aclose)
        self._record.resources.push_async_callback(self._stop_starting)  # before that: it may still be read
        async for event in self:
            if isinstance(event, Accepted):
                if self._model_wait is not None:
                    self._model_wait.close()
                check_prompt_length(event, self._card)
                check_prompt_logprobs(generations, event)
                return event
            if not isinstance(event, Heartbeat):
                break
            self._count_as_waiting()
        raise UpstreamProtocolError("The upstream began an answer without accepting the request.")

    async def call(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        receive: Receive,
        *,
        admission: Admission | None = None,
    ) -> T:
        """Wait for admission, then for `work`, which returns the whole answer; ending the running cancels it.

        `admission` grants the permit; None: the one for generations.

        Raises:
            GatewayError: as for `start`.
        """
        await self._enter(receive, permits=1, admission=admission)
        answer = await self._race(work())
        self._over = True
        return answer

    def __aiter__(self) -> "RunningRequest":
        return self

    async def __anext__(self) -> Event:
        # `_race`, written out: it is on the way of every token.
        if self._error is not None:
            raise self._error
        record = self._record
        task = self._waiting = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a request waits inside a task")
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
            record.waited_s += perf_counter() - began
        return record.observe(event)

    async def _stop_starting(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        if starting is not None and not starting.cancelled():
            starting.exception()  # which nobody may have waited for

    async def stop_watching(self) -> None:
        """Stop watching for the client's hang-up: from now on, whoever streams the answer notices it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None

    async def _enter(self, receive: Receive, *, permits: int, admission: Admission | None = None) -> None:
        """Wait for admission; whatever can end the request may do so from now on."""
        admission = admission or self._gateway.admission
        self._record.generates = admission is self._gateway.admission
        self._begin(receive)
        self._charge_key(permits)
        await self._admit(admission, permits)

    def _begin(self, receive: Receive) -> None:
        """Start everything that can end the request, once."""
        if self._watcher is not None:
            return
        record, gateway = self._record, self._gateway
        record.resources.callback(self._forget_error)
        record.resources.enter_context(gateway.drain.registered(self.end))
        deadline = self._loop.call_at(record.deadline, self.end, _too_late())
        record.resources.callback(deadline.cancel)
        self._watcher = self._loop.create_task(self._watch(receive))
        record.resources.push_async_callback(self.stop_watching)

    def _charge_key(self, answers: int) -> None:
        """Count the request against the limits of its key.

        Raises:
            RateLimitError: the key is at one of them.
        """
        record = self._record
        use = self._gateway.key_limits.use_of(record.key_name)
        if use is None:
            return
        try:
            taken = use.begin(answers)
        except RateLimitError as error:
            record.rejected(error, "key_limit")
            raise
        record.resources.callback(lambda: use.end(taken, record.tokens))

    async def _admit(self, admission: Admission, permits: int) -> None:
        metrics, model = self._gateway.metrics, self._record.model
        # The gauges count generations only, not tokenizations, which have an admission of their own.
        counts = self._record.generates
        metrics.waiting.labels(model).inc(counts)
        began = perf_counter()
        try:
            with self._record.trace.part("admission"):
                taken = await self._race(admission.acquire(permits))
        except tuple(_REJECTED) as error:
            self._record.rejected(error, _REJECTED[type(error)])
            raise
        finally:
            self._record.queued_s = perf_counter() - began
            metrics.waiting.labels(model).dec(counts)
        self._record.resources.callback(admission.release, permits)
        self._taken = taken * counts
        metrics.in_flight.labels(model).inc(self._taken)
        self._record.resources.callback(metrics.in_flight.labels(model).dec, self._taken)

    def _count_as_waiting(self) -> None:
        """Count the request as waiting, not as in flight, until the upstream accepts it: no engine has it."""
        if self._model_wait is not None:
            return
        metrics, model = self._gateway.metrics, self._record.model
        self._model_wait = ExitStack()
        for gauge, change in ((metrics.waiting, 1), (metrics.in_flight, -self._taken)):
            gauge.labels(model).inc(change)
            self._model_wait.callback(gauge.labels(model).dec, change)
        self._record.resources.callback(self._model_wait.close)

    def _bounded(self, generation: Generation) -> Generation:
        """Return `generation` with the configured limit on new tokens if its client set none."""
        bound = self._gateway.settings.default_max_tokens
        if bound is None or generation.max_tokens is not None or generation.max_total_tokens is not None:
            return generation
        return replace(generation, max_tokens=max(bound, generation.min_tokens), max_tokens_yields=True)

    async def _race(self, step: Coroutine[Any, Any, T]) -> T:
        """Await `step`; if `end` is called first, cancel it and raise the error given to `end`."""
        if self._error is not None:  # it ended while it did not wait, as while its body was read
            step.close()
            raise self._error
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request waits inside a task")
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
            self._record.waited_s += perf_counter() - began

    def _raise_end(self, task: asyncio.Task[Any], others: int) -> None:
        """Raise the error given to `end` if that cancelled `task`, and nobody else did at the same time."""
        if self._error is not None and task.uncancel() <= others:
            raise self._error from None

    def _forget_error(self) -> None:
        """Drop the error, whose traceback refers back to this object; see `RequestRecord.forget_error`."""
        self._over, self._error = True, None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGoneError("The client hung up."))


def _too_late() -> DeadlineError:
    return DeadlineError("The request took longer than the gateway or the client allows.")
