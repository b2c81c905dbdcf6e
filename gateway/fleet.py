"""Metrics of a gateway with several processes: each process reports those of all.

Each process's series have a label `worker`, its number. A sum over the processes would fall when one of them
is replaced, and Prometheus would take that for a reset and count the others' values again.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.metrics import Metrics

_ANSWER_WITHIN_S = 2.0
_LABEL = "worker"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place among those of its gateway."""

    number: int
    """From 0."""
    count: int
    """Number of processes."""
    folder: Path
    """The folder of the sockets between them; private to this user."""
    table: int
    """The descriptor of the memory that they share (see `gateway.tally`)."""

    def socket(self, number: int) -> Path:
        """Return the socket of the process with that number."""
        return self.folder / str(number)


class _Family(msgspec.Struct, frozen=True):
    """One metric of one process."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


_decode = msgspec.msgpack.Decoder(list[_Family]).decode


class Fleet:
    """Answers the other processes' requests for metrics, and requests theirs.

    Args:
        place: this process's place.
        metrics: this process's metrics.
    """

    def __init__(self, place: Place, metrics: Metrics) -> None:
        self._place = place
        self._metrics = metrics
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start answering."""
        path = self._place.socket(self._place.number)
        path.unlink(missing_ok=True)  # left by the process that this one replaces
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def render(self) -> bytes:
        """Return the exposition of all processes; one that does not answer is reported as down."""
        answers = await asyncio.gather(*map(self._ask, range(self._place.count)))
        registry = CollectorRegistry()
        registry.register(_Joined(answers))
        return generate_latest(registry)

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                writer.write(msgspec.msgpack.encode(_families(self._metrics.registry)))
                await writer.drain()
            writer.close()
        except (TimeoutError, ConnectionError):
            writer.transport.abort()  # Whoever does not read must not keep this process from ending.

    async def _ask(self, number: int) -> list[_Family] | None:
        if number == self._place.number:
            return _families(self._metrics.registry)
        with contextlib.suppress(msgspec.MsgspecError):
            answer = await _read(self._place.socket(number))
            return None if answer is None else _decode(answer)
        return None


async def answers(place: Place) -> bool:
    """Tell whether the process in that place is there and able to answer."""
    return bool(await _read(place.socket(place.number)))


async def _read(socket: Path) -> bytes | None:
    """Return what the process behind that socket says; None: it ended, hangs, or has not started yet."""
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            with contextlib.closing(writer):
                return await reader.read()
    except (TimeoutError, OSError):
        return None


class _Joined(Collector):
    """The families of several processes, grouped by name as the text format requires."""

    def __init__(self, answers: list[list[_Family] | None]) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "tritongate_worker_up", "1 when that process of the gateway answers.", labels=[_LABEL]
        )
        joined: dict[str, Metric] = {}
        for number, families in enumerate(self._answers):
            worker = {_LABEL: str(number)}
            up.add_metric([str(number)], families is not None)
            for family in families or ():
                metric = joined.setdefault(family.name, Metric(family.name, family.help, family.type))
                for name, labels, value in family.samples:
                    metric.add_sample(name, worker | labels, value)
        return [up, *joined.values()]


def _families(registry: CollectorRegistry) -> list[_Family]:
    return [
        _Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]
