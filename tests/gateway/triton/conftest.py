"""Scripted Tritons, and pools in front of them."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import Counter as Metric

from gateway.telemetry.metrics import Metrics
from gateway.triton import channel as delta_channel
from gateway.triton.options import HealthPolicy, OnDemandPolicy, PoolOptions
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_resolver import NAME, FakeResolver
from tests.gateway.triton.fake_triton import FakeTriton, until

FAST = HealthPolicy(
    interval_s=0.02, probe_timeout_s=5.0, stuck_after_s=10.0, backoff_first_s=0.01, backoff_limit_s=0.05
)


@pytest.fixture
def fast() -> HealthPolicy:
    """Health watched so often that tests need not wait."""
    return FAST


@pytest.fixture
async def tritons() -> AsyncIterator[Callable[[], Awaitable[FakeTriton]]]:
    """Starts servers, as many as are asked for."""
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> FakeTriton:
            triton = FakeTriton()
            await triton.start()
            stack.push_async_callback(triton.stop)
            return triton

        yield start


@pytest.fixture
async def triton(tritons: Callable[[], Awaitable[FakeTriton]]) -> FakeTriton:
    return await tritons()


@pytest.fixture
def fake(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> FakeChannels:
    monkeypatch.setattr(delta_channel, "OPEN_WAIT_S", 60.0)  # however slow the machine
    return FakeChannels(triton.model)


class Observer:
    """What pools have counted, by the labels of each metric in their order."""

    def __init__(self) -> None:
        self.metrics = Metrics()

    @property
    def errors(self) -> list[tuple[str, ...]]:
        return list(_series(self.metrics.upstream_errors).elements())

    @property
    def resumes(self) -> list[tuple[str, ...]]:
        return list(_series(self.metrics.resumes).elements())

    @property
    def lookups(self) -> Counter[tuple[str, ...]]:
        return +_series(self.metrics.upstream_lookups)

    @property
    def loads(self) -> list[tuple[str, ...]]:
        return list(_series(self.metrics.model_loads).elements())

    @property
    def unloads(self) -> list[tuple[str, ...]]:
        return list(_series(self.metrics.model_unloads).elements())


def _series(metric: Metric) -> Counter[tuple[str, ...]]:
    (family,) = metric.collect()
    return Counter({tuple(sample.labels.values()): int(sample.value) for sample in family.samples})


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
async def serve(observer: Observer) -> AsyncIterator[Callable[..., Awaitable[TritonUpstream]]]:
    """Starts a pool in front of Tritons and, unless told not to, waits until all of them are ready."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*tritons: Any, ready: bool = True, **options: Any) -> TritonUpstream:
            names = options.pop("names", [])
            chosen = PoolOptions(
                **{"models": ["m"], "health": FAST, "metrics": observer.metrics, "idle_timeout_s": 20}
                | options
            )
            pool = TritonUpstream([*(triton.address for triton in tritons), *names], chosen)
            await pool.start()
            stack.push_async_callback(pool.close)
            if ready:
                await until(
                    lambda: (
                        bool(pool.replicas())
                        and all(replica.state is ReplicaState.READY for replica in pool.replicas())
                    )
                )
            return pool

        yield start


@pytest.fixture
def resolver() -> FakeResolver:
    return FakeResolver()


@pytest.fixture
async def named(serve: Any, resolver: FakeResolver) -> Any:
    """Starts a pool in front of a name, looked at often."""

    async def start(*tritons: Any, names: Any = (NAME,), **options: Any) -> TritonUpstream:
        options = {"resolve": resolver, "resolve_interval_s": 0.02, "ready": False} | options
        pool: TritonUpstream = await serve(*tritons, names=names, **options)
        return pool

    return start


@pytest.fixture
def demand(serve: Any) -> Any:
    """Starts a pool that loads the models of a Triton on demand."""

    async def start(*tritons: FakeTriton, models: Any = None, options: Any = None, **policy: Any) -> Any:
        rules = OnDemandPolicy(**{"min_loaded_s": 0.05} | policy)
        names = list(tritons[0].models) if models is None else models
        return await serve(*tritons, models=names, ready=False, on_demand=rules, **options or {})

    return start
