"""Assembles the gateway: each call makes an independent application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.routing import Route

from gateway.admission import Admission
from gateway.api import admin, chat, completions, docs, health, models, openapi, responses, tokenize
from gateway.api.failures import error_handlers
from gateway.auth import Keyring
from gateway.body_limit import BodyLimitMiddleware
from gateway.drain import Drain
from gateway.fleet import Fleet, Place
from gateway.key_limits import KeyLimits, KeyUse
from gateway.kserve import http as kserve_http
from gateway.kserve import predict
from gateway.kserve.door import Door
from gateway.metrics import Metrics
from gateway.middleware import ExchangeMiddleware, Records
from gateway.openai.sse import let_drains_finish_streams
from gateway.resources import Gateway
from gateway.setting_types import revealed
from gateway.settings import Settings
from gateway.tally import Tally
from gateway.tracing import PassOn, Tracing
from gateway.triton.pool import TritonUpstream
from gateway.upstream import Upstream
from gateway.version import version

_FIRST_LOOK_WITHIN_S = 3.0
_LOOK_EVERY_S = 0.02
_TOKENIZED_AT_ONCE = 8
"""A tokenizer entry handles one request at a time, so more than its next few wait in the gateway."""


def create_app(settings: Settings, upstream: Upstream | None = None, place: Place | None = None) -> FastAPI:
    """Make the application.

    Args:
        settings: nothing below reads flags, environment or files.
        upstream: serves the models; None: the Tritons that the settings name. Started and closed by the
            application's lifespan.
        place: among the processes of this gateway; None: it is the only one.
    """
    let_drains_finish_streams()
    metrics = Metrics()
    keys = len(settings.api_keys)
    tally = Tally(
        gauges=2 * Admission.GAUGES + 1 + keys * KeyUse.GAUGES, counters=keys * KeyUse.COUNTERS, place=place
    )
    gateway = Gateway(
        settings=settings,
        upstream=upstream if upstream is not None else triton_upstream(settings, metrics),
        metrics=metrics,
        admission=Admission(
            max_in_flight=settings.max_in_flight, max_waiting=settings.max_waiting, tally=tally
        ),
        tokenizing=Admission(
            max_in_flight=_TOKENIZED_AT_ONCE,
            max_waiting=settings.max_waiting,
            tally=tally,
            work="tokenizations",
        ),
        body_bytes=tally.gauge(),
        keyring=Keyring(settings.api_keys),
        key_limits=KeyLimits(settings.api_keys, tally),
        drain=Drain(),
        tracing=make_tracing(settings),
        fleet=None if place is None else Fleet(place, metrics),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if gateway.fleet is not None:
            await gateway.fleet.start()
        following = None if place is None else asyncio.create_task(gateway.key_limits.follow())
        await gateway.upstream.start()
        try:
            if place is not None:
                await _first_look(gateway)
            yield
        finally:
            if following is not None:
                following.cancel()
            await gateway.upstream.close()
            await asyncio.to_thread(gateway.tracing.close)
            if gateway.fleet is not None:
                await gateway.fleet.close()

    app = FastAPI(
        title="tritongate",
        version=version(),
        description="OpenAI-compatible gateway for ChatGLM on NVIDIA Triton.",
        lifespan=lifespan,
        exception_handlers=error_handlers(),
        docs_url=None,  # that page would load its scripts from another host: ours is `gateway.api.docs`
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.records = Records(gateway)
    app.state.door = Door(gateway)
    resources = (chat, completions, responses, tokenize, predict, admin, models, health, kserve_http)
    for resource in resources:
        app.include_router(resource.router)
    app.state.routes = [
        route for resource in resources for route in resource.router.routes if isinstance(route, Route)
    ]
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, gateway=gateway)
    app.add_middleware(ExchangeMiddleware, records=app.state.records)
    openapi.install(app)
    docs.install(app)
    return app


async def _first_look(gateway: Gateway) -> None:
    """Wait a little for the models before the first request is served.

    Connections to a process that died wait for the one that replaces it, which finds as many requests at its
    start, and would answer them that it has not reached any Triton yet.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_LOOK_WITHIN_S):
            while not gateway.ready():  # noqa: ASYNC110 - as in `gateway.server`
                await asyncio.sleep(_LOOK_EVERY_S)


def make_tracing(settings: Settings) -> Tracing:
    """Make the tracing that records requests as spans or, without an endpoint, passes clients' traces on."""
    if settings.trace_endpoint is None:
        return PassOn()
    # OpenTelemetry's SDK is an extra, imported only where it is used.
    from gateway.spans import Recording  # noqa: PLC0415

    return Recording(settings.trace_endpoint, settings.trace_sample)


def triton_upstream(settings: Settings, metrics: Metrics) -> TritonUpstream:
    """Make the upstream for the Tritons that `settings` names, observed by `metrics`."""
    return TritonUpstream(
        upstreams=settings.upstreams,
        models=settings.models,
        idle_timeout_s=settings.idle_timeout_s,
        load_timeout_s=settings.load_timeout_s,
        observer=metrics,
        repository_key=revealed(settings.repository_key),
        resolve_interval_s=settings.resolve_interval_s,
    )
