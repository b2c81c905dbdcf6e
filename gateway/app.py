"""Assembles the gateway: each call makes an independent application."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from gateway import version
from gateway.anthropic import routes as anthropic
from gateway.core.upstream import Upstream
from gateway.http import openapi, ops, routes, tokens
from gateway.http.middleware import BodyLimitMiddleware, RecordMiddleware, error_handlers
from gateway.http.record import Gateway, Records
from gateway.http.sites import Sites
from gateway.http.sse import let_drains_finish_streams
from gateway.kserve import http as kserve_http
from gateway.kserve import predict
from gateway.kserve.door import Door
from gateway.limits.admission import Admission, Connections, Drain
from gateway.limits.bodies import Bodies
from gateway.limits.counters import SharedCounters
from gateway.limits.keys import KeyLimits, Keyring
from gateway.page.routes import add_page
from gateway.settings import Settings
from gateway.settings.follow import as_applied, follow
from gateway.settings.values import revealed
from gateway.telemetry.metrics import Metrics, Place, WorkerMetrics
from gateway.telemetry.tracing import Tracing
from gateway.triton.dialects import Dialects
from gateway.triton.errors import COUNTED
from gateway.triton.options import OnDemandPolicy, PoolOptions
from gateway.triton.pool import TritonUpstream
from gateway.triton.public import Plan, PublicModels
from gateway.triton.resolver import Resolve, resolve

_TOKENIZED_AT_ONCE = 8
"""A model tokenizes one request at a time, so more than its next few wait in the gateway."""


def create_app(settings: Settings, upstream: Upstream | None = None, place: Place | None = None) -> FastAPI:
    """Make the application.

    Args:
        settings: nothing below reads flags, environment or files.
        upstream: serves the models; None: the Tritons that the settings name. Started and closed by the
            application's lifespan.
        place: among the processes of this gateway; None: it is the only one.
    """
    let_drains_finish_streams()
    if place is not None:
        settings = as_applied(settings, place.applied)
    metrics = Metrics(vllm_names=settings.vllm_metrics)
    public: PublicModels | None = None
    if upstream is None:
        warn = settings.warn_of_faults and (place is None or place.number == 0)  # one process for all
        upstream = public = triton_upstream(settings, metrics, warn_of_faults=warn)
        metrics.upstreams.look, metrics.upstreams.codes = public.states, COUNTED
    metrics.models.set_function(lambda: len(upstream.models()))
    shared = SharedCounters(
        gauges=3 * Admission.GAUGES + 2,
        counters=0,
        named=KeyLimits.room(settings),
        place=place,
    )
    gateway = Gateway(
        settings=settings,
        upstream=upstream,
        metrics=metrics,
        admission=Admission(
            max_in_flight=settings.max_in_flight, max_waiting=settings.max_waiting, shared=shared
        ),
        tokenizing=Admission(
            max_in_flight=_TOKENIZED_AT_ONCE,
            max_waiting=settings.max_waiting,
            shared=shared,
            work="tokenizations",
        ),
        logits=Admission(
            max_in_flight=settings.logits_bytes,
            max_waiting=settings.max_waiting,
            shared=shared,
            work="bytes of logits",
        ),
        shared=shared,
        bodies=Bodies(settings.max_held_body_bytes, shared),
        keyring=Keyring(settings.api_keys),
        sites=Sites(settings),
        key_limits=KeyLimits(settings.api_keys, shared),
        drain=Drain(),
        tracing=Tracing(settings.trace_endpoint, settings.trace_sample),
        worker_metrics=None if place is None else WorkerMetrics(place, metrics, shared.lives),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if gateway.worker_metrics is not None:
            await gateway.worker_metrics.start()
        await gateway.upstream.start()
        tasks = [asyncio.create_task(work) for work in _background(gateway, public, place)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await gateway.upstream.close()
            await asyncio.to_thread(gateway.tracing.close)
            if gateway.worker_metrics is not None:
                await gateway.worker_metrics.close()

    page = routes.new_router(include_in_schema=False)
    if settings.chat_page:
        add_page(page)
    routers = (
        routes.router,
        tokens.router,
        anthropic.router,
        predict.router,
        ops.admin_router,
        ops.router,
        kserve_http.router,
        page,
    )
    app = FastAPI(
        title="tritongate",
        version=version(),
        description="OpenAI-compatible gateway for language models on NVIDIA Triton.",
        lifespan=lifespan,
        exception_handlers=error_handlers(),
        routes=[route for router in routers for route in router.routes],
        # `gateway.http.openapi` has both: FastAPI's own page would load scripts from another host.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[routes.OwnSite],
    )
    app.state.gateway = gateway
    app.state.connections = Connections(settings.max_connections, shared)
    app.state.records = Records(gateway)
    app.state.door = Door(gateway)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, gateway=gateway)
    app.add_middleware(RecordMiddleware, records=app.state.records)
    if settings.cors_origins:  # around all: a page must be able to read every answer, a 503 too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # these sites are named, wherever they are
            # What SDKs go by is among them. Of a request with cookies, which are not allowed, * is none.
            expose_headers=["*"],
        )
    openapi.install(app)
    return app


def _background(
    gateway: Gateway, public: PublicModels | None, place: Place | None
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield what runs beside the requests; `public` are the models, where they are the Tritons'."""
    settings, metrics = gateway.settings, gateway.metrics
    applied = {} if place is None else place.applied
    if place is not None:
        yield gateway.key_limits.follow()
    if settings.keys_file is not None:
        yield follow(
            "api_keys",
            settings,
            gateway.apply_keys,
            partial(metrics.file_read, metrics.keys_file_reloads),
            applied.get("api_keys"),
        )
    if public is not None and settings.models_file is not None:
        yield follow(
            "models",
            settings,
            public.apply,
            partial(metrics.file_read, metrics.models_file_reloads),
            applied.get("models"),
        )


def triton_upstream(
    settings: Settings,
    metrics: Metrics | None = None,
    resolve: Resolve = resolve,
    *,
    warn_of_faults: bool = False,
) -> PublicModels:
    """Make the upstream for the models and Tritons that `settings` names, which `resolve` looks up."""
    metrics = metrics or Metrics()
    on_demand = OnDemandPolicy(
        max_loaded=settings.max_loaded_models,
        max_loaded_gib=settings.max_loaded_gib,
        min_loaded_s=settings.min_loaded_s,
        unload_idle_s=settings.unload_idle_s,
    )

    def pool(plan: Plan, names: Callable[[str], Sequence[str]]) -> TritonUpstream:
        options = PoolOptions(
            models=plan.entries,
            names=names,
            metrics=metrics,
            dialects=Dialects(plan.tokenizers, dict(plan.dialects)),
            on_demand=(
                replace(on_demand, gib=dict(plan.gib), pinned=plan.pinned)
                if settings.load_on_demand
                else None
            ),
            idle_timeout_s=settings.idle_timeout_s,
            load_timeout_s=settings.load_timeout_s,
            upstream_wait_s=settings.upstream_wait_s,
            resume=settings.resume,
            repository_key=revealed(settings.repository_key),
            warn_of_faults=warn_of_faults,
            tls_of=settings.tls_of,
            resolve=resolve,
            resolve_interval_s=settings.resolve_interval_s,
        )
        return TritonUpstream(plan.upstreams, options)

    return PublicModels(settings, pool)
