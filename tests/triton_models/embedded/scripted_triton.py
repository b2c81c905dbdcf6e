"""A scripted Triton, and one model's supervisor over it."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton_models.embedded.errors import ModelError, ServerError
from triton_models.embedded.server import Ports, ServerLog
from triton_models.embedded.supervisor import Supervisor
from triton_models.embedded.warden import RunDirectory
from wire.events import Event
from wire.meta import ProbeReport

WELL = ProbeReport(heartbeat_age_s=0.1, running=0, waiting=0, format="chatglm3", max_context=1)


class Triton:
    """Server and client in one: a model that loads and answers, until told otherwise."""

    ports, key = Ports(grpc=1, metrics=2), "name=value"
    _pids = itertools.count(1)

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder)
        self.log = ServerLog(self.run.log)
        self.calls: list[str] = []
        self.processes: set[int] = set()
        self.answers: list[ProbeReport | ModelError | Exception] = []
        """Of the next probes."""
        self.load_errors: list[ModelError] = []
        """Of the next loads."""
        self.hangs = False
        self.answers_live = True
        self.unloaded_by_somebody = False
        self.index_errors: list[ModelError] = []
        """Of the next questions whether somebody unloaded it."""
        self.asked_whether_unloaded = 0
        self.ends: list[ServerError] = []
        """How it ends, soon after it was started, as often as this has entries."""

    async def start(self) -> "Triton":
        self.calls.append("start")
        return self

    def end(self) -> ServerError | None:
        return self.ends.pop(0) if self.ends and "load" in self.calls else None

    def stop(self) -> None:
        self.calls.append("stop")
        self.processes.clear()

    async def aclose(self) -> None:
        pass

    async def live(self, _: float) -> bool:
        return self.answers_live

    def stubs(self, _: str) -> set[int]:
        return set(self.processes)

    def command_line(self, pid: int) -> list[str]:
        return ["stub"] if pid in self.processes else []

    async def load(self, _: str) -> None:
        self.calls.append("load")
        while self.hangs:  # noqa: ASYNC110 - set by tests
            await asyncio.sleep(0.01)
        if self.load_errors:
            raise self.load_errors.pop(0)
        self.processes.clear()
        self.processes.add(next(self._pids))

    async def unload(self, *_: Any) -> None:
        self.calls.append("unload")

    async def unloaded(self, *_: Any) -> bool:
        self.asked_whether_unloaded += 1
        if self.index_errors:
            raise self.index_errors.pop(0)
        return self.unloaded_by_somebody

    async def probe(self, *_: Any) -> ProbeReport:
        answer = self.answers.pop(0) if self.answers else WELL
        if isinstance(answer, Exception):
            raise answer
        return answer


class Watched:
    """The supervisor, and what it says."""

    def __init__(self, triton: Any, *, at_start: int | None = None) -> None:
        self.triton = triton
        self.seen: list[Event] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.supervisor = Supervisor(triton, ["m"], self._take, at_start=at_start)
        self._running = asyncio.create_task(self.supervisor.run())

    def _take(self, event: Event) -> None:
        self.seen.append(event)
        self._events.put_nowait(event)

    @property
    def up(self) -> bool:
        return self.supervisor._models[0].up

    async def next(self, kind: type) -> Any:
        """Return the next event of this kind, or raise what ended the supervisor."""
        while True:
            take = asyncio.ensure_future(self._events.get())
            await asyncio.wait({take, self._running}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            if not take.done():
                take.cancel()
                await self._running
            if isinstance(event := take.result(), kind):
                return event

    async def failure(self) -> Exception:
        """Return what ended the supervisor."""
        await asyncio.wait({self._running}, timeout=10)
        failure = self._running.exception()
        assert isinstance(failure, Exception)
        return failure

    async def wait(self, holds: Callable[..., object]) -> None:  # called with nothing
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110 - anything may be waited for
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait({self._running}, timeout=10)
        assert self.triton.calls[-1] == "stop"
