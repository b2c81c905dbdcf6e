"""The processes of one gateway: whichever is asked for metrics tells those of all.

The series of each have a label `worker`, its number. Added up, they would fall when a process is replaced,
and Prometheus would count what the others have once more.
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
    """Which process of a gateway this is."""

    number: int
    """From 0."""
    count: int
    """Of all of them."""
    folder: Path
    """Of the sockets by which they ask each other; nobody else may enter it."""

    def socket(self, number: int) -> Path:
        """Return where the process of that number is asked."""
        return self.folder / str(number)


class _Family(msgspec.Struct, frozen=True):
    """One metric of one process."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


_decode = msgspec.msgpack.Decoder(list[_Family]).decode


class Fleet:
    """Answers the other processes, and asks them.

    Args:
        place: of this process.
        metrics: its own.
    """

    def __init__(self, place: Place, metrics: Metrics) -> None:
        self._place = place
        self._metrics = metrics
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to answer."""
        path = self._place.socket(self._place.number)
        path.unlink(missing_ok=True)  # of the process that this one replaces
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def render(self) -> bytes:
        """Return the exposition of all processes; one that does not answer is told to be down."""
        answers = await asyncio.gather(*map(self._ask, range(self._place.count)))
        registry = CollectorRegistry()
        registry.register(_Joined(answers))
        return generate_latest(registry)

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(msgspec.msgpack.encode(_families(self._metrics.registry)))
            await writer.drain()
        writer.close()

    async def _ask(self, number: int) -> list[_Family] | None:
        if number == self._place.number:
            return _families(self._metrics.registry)
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                reader, writer = await asyncio.open_unix_connection(self._place.socket(number))
                with contextlib.closing(writer):
                    return _decode(await reader.read())
        except (TimeoutError, OSError, msgspec.MsgspecError):
            return None  # It ended, or has not begun.


class _Joined(Collector):
    """The families of several processes, those of a name together, as the text format wants them."""

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
