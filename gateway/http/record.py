"""What all requests share, and the record of each, from which its metrics, span and log line are made.

`deadline` is on the event loop's clock; `arrived` and all other times are `time.perf_counter` values. All are
in seconds. The log line holds prompts only if `log_prompts` asks for the body, and never a key, only its
owner's name.
"""

import asyncio
import dataclasses
import logging
import math
import random
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final
from urllib.parse import quote

from msgspec import structs
from opentelemetry.trace import Status, StatusCode
from starlette.types import Send

from gateway.core.events import Accepted, Delta, Event, Timings
from gateway.core.upstream import ModelCard, Upstream
from gateway.errors import (
    ClientGoneError,
    ControlDisabledError,
    GatewayError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
)
from gateway.http.sites import Sites
from gateway.limits.admission import Admission, Drain, Pacing, Phase, shutting_down, too_many_connections
from gateway.limits.bodies import Bodies
from gateway.limits.counters import SharedCounters
from gateway.limits.keys import KeyLimits, Keyring
from gateway.settings import Settings
from gateway.settings.values import Scope, is_loopback
from gateway.telemetry.logs import request_id as current_request_id
from gateway.telemetry.metrics import UNKNOWN, Metrics, TokenMetrics, WorkerMetrics
from gateway.telemetry.tracing import Trace, Tracing, current_trace

REQUEST_ID_HEADER: Final = "X-Request-Id"
BODY_LIMIT_BYTES: Final = 16 * 1024
"""How much of a body is logged."""
NAME_LIMIT: Final = 256
"""Characters of a model's name."""
_READS: Final = frozenset({"GET", "HEAD"})
"""Methods of requests that nothing is sent to Triton for: they wait behind no burst."""

_PROXIED: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers that a reverse proxy adds: whoever sent such a request need not be on this machine."""

_request_id = re.compile(r"[\x21-\x7e]{1,128}")
_LONGEST_LINE = 400
"""In characters."""

_log = logging.getLogger("gateway.access")
_dice = random.Random()  # noqa: S311 - which requests are logged is no secret
"""Its own, so that nobody else's seed decides what is logged, and logging changes nobody else's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one running gateway."""

    settings: Settings
    upstream: Upstream
    metrics: Metrics
    admission: Admission
    """Limits generations."""
    tokenizing: Admission
    """Limits tokenizations, which work while the engines are full."""
    logits: Admission
    """Whose permits are the bytes of logits that answers hold."""
    shared: SharedCounters
    bodies: Bodies
    keyring: Keyring
    sites: Sites
    key_limits: KeyLimits
    drain: Drain
    tracing: Tracing
    worker_metrics: WorkerMetrics | None
    """Where other processes serve beside this one."""

    def authorize_admin(self, headers: Mapping[str, str]) -> str | None:
        """Check that whoever sent a request with these headers may control models; return the key's name.

        Raises:
            ControlDisabledError: there are no keys, and the sender may be on another machine.
            GatewayError: as `Keyring.authorize`.
        """
        if not (self.settings.api_keys or self.from_here(headers)):
            raise ControlDisabledError(
                "Without keys, models are controlled from this machine only, and not through a proxy:"
                " add a key with the scope admin."
            )
        return self.keyring.authorize(headers, Scope.ADMIN)

    def from_here(self, headers: Mapping[str, str]) -> bool:
        """Whether whoever sent a request with these headers is on this machine, as far as they tell."""
        return is_loopback(self.settings.host) and not any(name in headers for name in _PROXIED)

    def models(self, key: str | None) -> list[ModelCard]:
        """Return the models that the owner of that key may use; None: a caller without a key."""
        return [card for card in self.upstream.models() if self._open_to(card, key)]

    def model(self, name: str, key: str | None) -> ModelCard:
        """Return a model by its public name or an alias, for the owner of that key.

        Raises:
            InvalidRequestError: nothing can have this name; it is not repeated.
            ModelNotFoundError: there is none, or it is not for this key, which is told the same.
        """
        if len(name) > NAME_LIMIT:
            raise InvalidRequestError(f"A model's name has at most {NAME_LIMIT} characters.", param="model")
        card = self.upstream.model(name)
        if not self._open_to(card, key):
            raise ModelNotFoundError.of(name)
        return card

    def _open_to(self, card: ModelCard, key: str | None) -> bool:
        names = (card.id, *card.settings.aliases)
        return card.settings.open_to(key) and self.keyring.may_use(key, names)

    async def apply_keys(self, settings: Settings) -> None:
        """Know and limit the keys of `settings` from now on; running requests end as they began.

        Raises:
            ConfigurationError: there is no room for so many; nothing has changed.
        """
        self.key_limits.apply(settings.api_keys)
        self.keyring.apply(settings.api_keys)

    async def exposition(self) -> bytes:
        """Return what Prometheus reads: of every process, where there are several."""
        return self.metrics.render() if self.worker_metrics is None else await self.worker_metrics.render()

    def not_ready(self) -> list[str] | None:
        """Return the models that should be loaded and do not answer; None when no model is known."""
        cards = self.upstream.models()
        return [card.id for card in cards if not (card.ready or card.unloaded)] if cards else None

    def serves(self) -> bool:
        """Whether this process will serve requests: every model that should be loaded answers; no drain."""
        return self.drain.phase is Phase.SERVING and self.not_ready() == []

    def ready(self) -> bool:
        """Whether requests will be served, whichever of the gateway's processes gets them."""
        return self.shared.begun and self.serves()


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request and its answer. The layers fill it in as they go; it is read when the request is over.

    The request's outermost frame releases `resources`, however the request ends: answered, failed, cancelled,
    or never begun.
    """

    request_id: str
    method: str
    arrived: float
    deadline: float
    metrics: Metrics
    resources: AsyncExitStack
    client: str | None = None
    """The address that it came from, a proxy's behind one; None: unknown."""
    path: str = UNKNOWN
    """Of HTTP, without the query."""
    probe: bool = False
    """Polled by machines every few seconds."""
    answer: ExitStack = field(default_factory=ExitStack)
    """What the answer holds until it was sent, which may be later than the request's own end."""
    trace: Trace = field(default_factory=Trace)
    send_body: Send | None = None
    """The server's own ASGI channel, for pieces of a body whose head went through all middleware."""
    model: str = UNKNOWN
    """The served model asked for, or `unknown`."""
    key_name: str | None = None
    generates: bool = False
    """True once it has asked for admission to the engines; metrics of generations then count it."""
    stream: bool = False
    include_timings: bool = False
    """Whether the client asked for them."""
    status: int | None = None
    """As sent; None until then."""
    error: GatewayError | None = None
    """The first thing that went wrong, before or after the first byte."""
    waited_s: float = 0.0
    """Time spent waiting for the client's body, for admission and for the upstream."""
    queued_s: float | None = None
    """The part of `waited_s` spent waiting for admission; None: it needed none, or did not get that far."""
    engine_queued_s: float | None = None
    """Time on the engine's waiting list, as the engine tells it with the answer's end."""
    ignored: dict[str, None] = field(default_factory=dict)
    """Names of fields of its body that were ignored, in their order."""
    body: bytes | None = None
    """As the client sent it; kept only if it is to be logged."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)
    """By choice."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """By choice."""
    _whole: bool = field(default=True, init=False)
    """Whether all of a choice may come with its end."""
    _counting: TokenMetrics | None = field(default=None, init=False)
    """Looked up with the first token, once: labels cost more than what they count."""

    @property
    def outcome(self) -> int:
        """The effective status: the error's, if there was one, even if 200 had already been sent."""
        if self.error is not None:
            return self.error.status
        return self.status if self.status is not None else ClientGoneError.status

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers together."""
        return self.prompt_tokens + self.generated_tokens

    def fail(self, error: GatewayError) -> None:
        """Record an error, unless there is one already; of a key that may not do this, its owner, too."""
        if self.error is None:
            self.error = error
        if isinstance(error, PermissionDeniedError) and error.key_name is not None:
            self.key_name = error.key_name

    def rejected(self, error: GatewayError, reason: str) -> GatewayError:
        """Count that it was turned away before any work; return the error, with the reason for its line."""
        self.metrics.rejected.labels(self.model, reason).inc()
        error.reason = reason
        return error

    def fail_unexpectedly(self) -> InternalError:
        """Log the exception that is being handled, and return what the client is told of it."""
        _log.exception("a request failed unexpectedly")
        failure = InternalError("The gateway failed; its log says why under this request's id.")
        self.fail(failure)
        return failure

    def forget_error(self) -> None:
        """Drop the error once it was reported, since its traceback refers to frames that hold this record.

        Otherwise only the next full garbage collection would free that cycle, and the request's body with it.
        """
        self.error = None

    def observe(self, event: Event) -> Event:
        """Count an event's tokens and the time between them; the usage goes on with what was measured."""
        if type(event) is Delta:
            if event.tokens:
                self._count(event)
            if event.finish_reason is not None:
                self.finish_reasons[event.index] = event.finish_reason
                self.metrics.choices.labels(self.model, event.finish_reason).inc()
            if event.usage is not None:
                self.engine_queued_s = event.usage.queue_s
                if self.include_timings:
                    usage = dataclasses.replace(event.usage, timings=self.timings())
                    return structs.replace(event, usage=usage)
        elif type(event) is Accepted:
            self._whole = event.whole or not self.stream
            self.prompt_tokens = event.prompt_tokens
            self.metrics.prompt_tokens.labels(self.model).inc(event.prompt_tokens)
        return event

    def timings(self) -> Timings:
        """Return where its time went up to now."""
        first, last = self.first_token_at, max(self.last_token_at.values(), default=None)
        return Timings(
            queued_ms=_ms(self.queued_s),
            engine_queued_ms=_ms(self.engine_queued_s),
            first_token_ms=None if first is None else _ms(first - self.arrived),
            generation_ms=None if first is None or last is None else _ms(last - first),
            server_ms=round((perf_counter() - self.arrived) * 1000, 3),
        )

    def _count(self, event: Delta) -> None:
        now, tokens, choice = perf_counter(), event.tokens, event.index
        self.generated_tokens += tokens
        counting = self._counting
        if counting is None:
            counting = self._counting = self.metrics.tokens_of(self.model)
        counting.generated.value += tokens
        before = self.last_token_at.get(choice)
        if before is None and tokens > 1 and event.finish_reason is not None and self._whole:
            return  # a backend that tells nothing before the end: nobody knows when they came
        if self.first_token_at is None:
            self.first_token_at = now
            counting.time_to_first.observe(now - self.arrived)
            self.trace.span.add_event("first_token")
        if before is not None:
            counting.inter_token.observe((now - before) / tokens, tokens)
        elif tokens > 1:
            counting.inter_token.observe(0.0, tokens - 1)
        self.last_token_at[choice] = now


class Records:
    """Opens and closes the records of requests: id, resources, trace, metrics and access log."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._pacing = Pacing()

    @asynccontextmanager
    async def opened(
        self,
        *,
        method: str,
        headers: Mapping[str, str],
        client: str | None,
        route: Callable[[], str],
        probe: bool = False,
    ) -> AsyncIterator[RequestRecord]:
        """Keep a request's record for a block, and release everything that the request held behind it.

        `method` is HTTP's, or `GRPC`; names of `headers` are in lower case. `route` returns the route that it
        took, for metrics, and is called when it is over.
        """
        gateway = self.gateway
        async with AsyncExitStack() as resources:
            record = RequestRecord(
                request_id=_accept_request_id(headers.get(REQUEST_ID_HEADER.lower())),
                method=method,
                arrived=perf_counter(),
                deadline=asyncio.get_running_loop().time() + gateway.settings.request_timeout_s,
                metrics=gateway.metrics,
                resources=resources,
                client=client,
                probe=probe,
                trace=Trace() if probe else gateway.tracing.begin(method, headers),
            )
            resources.callback(current_request_id.reset, current_request_id.set(record.request_id))
            resources.callback(current_trace.reset, current_trace.set(record.trace))
            resources.callback(record.forget_error)
            resources.callback(self._finish, record, route)
            resources.push(record.answer)
            yield record

    async def admit(self, record: RequestRecord, *, spare: bool = False) -> None:
        """Let a request in, or wait behind those that came with it; a drain then waits for its end.

        Only what may go to Triton waits: health, metrics and pages are answered during a burst, too.

        Raises:
            UnavailableError: it is no probe, and a drain runs, or it came by a `spare` connection.
        """
        drain = self.gateway.drain
        if drain.phase is not Phase.SERVING and not record.probe:
            raise record.rejected(shutting_down(), "draining")
        if spare and not record.probe:
            raise record.rejected(too_many_connections(), "connections")
        drain.enter()
        record.resources.callback(drain.leave)
        if not (record.probe or record.method in _READS):
            await self._pacing.enter()

    def refused(self, error: GatewayError, client: str | None) -> str:
        """Count and log what was refused before it was a request; return the id of its line."""
        record = RequestRecord(
            request_id=uuid.uuid4().hex,
            method=UNKNOWN,
            arrived=perf_counter(),
            deadline=math.inf,
            metrics=self.gateway.metrics,
            resources=AsyncExitStack(),
            client=client,
            error=error,
        )
        self._finish(record, lambda: UNKNOWN)
        return record.request_id

    def _finish(self, record: RequestRecord, route_of: Callable[[], str]) -> None:
        """Write the request's metrics, trace and log line, after everything else was released."""
        duration = perf_counter() - record.arrived
        route = route_of()
        status, model, metrics = record.outcome, record.model, record.metrics
        metrics.answered(route, model, status, duration)
        if record.generates:
            metrics.overhead.labels(model).observe(max(duration - record.waited_s, 0.0))
            if status == ClientGoneError.status:
                metrics.client_cancels.labels(model).inc()
        if record.key_name is not None:
            tokens = {"prompt": record.prompt_tokens, "generated": record.generated_tokens}
            metrics.key_used(record.key_name, model, status, **tokens)
        end_span(record, route)
        settings = self.gateway.settings
        if status < HTTPStatus.BAD_REQUEST and _dice.random() >= settings.log_sample:
            return
        if settings.log_format == "plain":
            if status >= HTTPStatus.BAD_REQUEST and status != ClientGoneError.status and not record.probe:
                _log.warning("%s", failure_line(record, route))
            return
        level = logging.WARNING if status >= HTTPStatus.INTERNAL_SERVER_ERROR else logging.INFO
        extra = request_line(record, route, duration)
        _log.log(logging.DEBUG if record.probe else level, "request", extra=extra)


def _accept_request_id(given: str | None) -> str:
    """Keep the client's id if it is short and printable, else make one."""
    return given if given and _request_id.fullmatch(given) else uuid.uuid4().hex


def request_line(record: RequestRecord, route: str, duration_s: float) -> dict[str, Any]:
    """Return the fields of a finished request's line; times are in milliseconds, with names in `_ms`."""
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "trace_id": record.trace.trace_id,
        "client": record.client,
        "method": record.method,
        "route": route,
        "status": record.outcome,
        "duration_ms": _ms(duration_s),
        "key": record.key_name,
        "model": None if record.model == UNKNOWN else record.model,
        "queued_ms": _ms(record.queued_s),
        "waited_ms": None if record.queued_s is None else _ms(record.waited_s),
        "ignored": ",".join(record.ignored) or None,
        "body": None if record.body is None else record.body[:BODY_LIMIT_BYTES].decode(errors="replace"),
    }
    if record.generates:
        line |= _generation(record)
    line |= _upstreams(record.trace)
    if (error := record.error) is not None:  # its message may quote what the client sent
        param = None if error.param is None else error.param[:NAME_LIMIT]
        line |= {"error": type(error).__name__, "reason": error.reason, "param": param}
    return {name: value for name, value in line.items() if value is not None}


def failure_line(record: RequestRecord, route: str) -> str:
    """Return what a terminal is told of a failed request; of what the client sent, only what can be shown."""
    status, error = record.outcome, record.error
    reason = HTTPStatus(status).phrase if error is None else error.message
    if error is not None and error.param is not None and not reason.startswith(error.param):
        reason = f"{error.param}: {reason}"
    asked = quote(record.path, safe="/:")[:NAME_LIMIT] if route == UNKNOWN else route
    text = f"{status} {record.method} {asked}: {reason}"
    # Parts of it are the client's, and not for the terminal to act on.
    return "".join(each if each.isprintable() else " " for each in text[:_LONGEST_LINE])


def end_span(record: RequestRecord, route: str) -> None:
    """End a finished request's span; refused and cancelled requests have the status that they deserved."""
    span = record.trace.span
    if not span.is_recording():
        return
    if route != UNKNOWN:
        span.update_name(f"{record.method} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", record.outcome)
    span.set_attribute("tritongate.request_id", record.request_id)
    if record.generates:
        span.set_attribute("gen_ai.request.model", record.model)
        span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", record.generated_tokens)
        span.set_attribute("tritongate.stream", record.stream)
    if record.error is not None:
        span.set_attribute("error.type", type(record.error).__name__)
    if record.outcome >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _generation(record: RequestRecord) -> dict[str, Any]:
    timings = record.timings()
    # Each reason once, in the order of the choices.
    reasons = dict.fromkeys(reason for _, reason in sorted(record.finish_reasons.items()))
    return {
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "engine_queued_ms": timings.engine_queued_ms,
        "first_token_ms": timings.first_token_ms,
        "generation_ms": timings.generation_ms,
        "finish_reason": ",".join(reasons) or None,
    }


def _upstreams(trace: Trace) -> dict[str, Any]:
    """Return the Tritons that answered or failed last, and the most attempts that any prompt needed."""
    called = [calls for calls in trace.calls if calls]
    # Each Triton once, even with several prompts.
    last = dict.fromkeys(calls[-1] for calls in called)
    return {"upstream": ",".join(last) or None, "attempts": max(map(len, called), default=None)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
