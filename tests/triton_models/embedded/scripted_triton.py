"""A scripted Triton, and one entry's watcher over it."""

import itertools
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_models.embedded import watcher
from triton_models.embedded.client import CallError, EntryState
from triton_models.embedded.entry import Entry, Surroundings
from triton_models.embedded.log import ServerLog
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.watcher import EntryWatcher
from wire.meta import ProbeReport

if TYPE_CHECKING:
    from wire.events import Event

WELL = ProbeReport(heartbeat_age_s=0.1, running=0, waiting=0, format="chatglm3", max_context=1)


class Stub:
    _pids = itertools.count(1)

    def __init__(self) -> None:
        self.alive = True
        self.pid = next(self._pids)

    def is_running(self) -> bool:
        return self.alive

    def status(self) -> str:
        return "sleeping"

    def kill(self) -> None:
        self.alive = False


class Triton:
    """Server and client in one: an entry that loads and answers, until told otherwise."""

    def __init__(self) -> None:
        self.state_ = EntryState("", "")
        self.processes: list[Stub] = []
        self.answers: queue.Queue[ProbeReport | CallError] = queue.Queue()
        self.load_error: CallError | None = None
        self.refusals: list[CallError] = []
        self.hangs = False
        self.calls: list[str] = []

    def stubs(self, _: str) -> list[Stub]:
        return [stub for stub in self.processes if stub.alive]

    def kill_stubs(self, name: str) -> None:
        for stub in self.stubs(name):
            stub.kill()

    def load(self, _: str) -> "Triton":
        self.calls.append("load")
        return self

    def wait(self, _: float) -> bool:
        if self.hangs:
            return False
        if self.load_error is not None:
            raise self.load_error
        self.processes = [Stub()]
        self.state_ = EntryState("READY", "")
        return True

    def generate(self, *_: Any) -> None:
        self.calls.append("generate")
        if self.refusals:
            raise self.refusals.pop()

    def unload(self, *_: Any) -> None:
        self.calls.append("unload")
        self.state_ = EntryState("UNAVAILABLE", "unloaded")

    def state(self, *_: Any) -> EntryState:
        return self.state_

    def probe(self, *_: Any) -> ProbeReport:
        try:
            answer = self.answers.get_nowait()
        except queue.Empty:
            return WELL
        if isinstance(answer, CallError):
            raise answer
        return answer


class Watched:
    def __init__(self, folder: Path) -> None:
        self.triton: Any = Triton()
        self.told: queue.Queue[Event] = queue.Queue()
        self.over = threading.Event()
        run = RunDirectory(folder)
        self.around = Surroundings(
            server=self.triton,
            client=self.triton,
            run=run,
            log=ServerLog(run.log),
            emit=self.told.put,
            over=self.over,
            loading=threading.Lock(),
        )

    def start(self, *, must_load: bool = True, engine: bool = True, needs: str | None = None) -> EntryWatcher:
        entry = Entry(name="m-stream", model="m", engine=engine, needs=needs)
        self.watcher = EntryWatcher(entry, self.around, must_load=must_load)
        self.watcher.start()
        return self.watcher

    def next(self, kind: type) -> Any:
        while True:
            event = self.told.get(timeout=60)
            if isinstance(event, kind):
                return event

    def wait_up(self) -> None:
        self.wait(lambda: self.watcher.state is watcher.EntryState.UP)

    @staticmethod
    def wait(holds: Any) -> None:
        for _ in range(6000):
            if holds():
                return
            threading.Event().wait(0.01)
        raise AssertionError
