"""Loads one repository entry into one server and keeps it answering, in its own thread."""

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from triton_models.embedded.backoff import Backoff
from triton_models.embedded.client import CallError, TritonClient
from triton_models.embedded.errors import LoadError, ServerError, StoppedError
from triton_models.embedded.log import DEAD_STUB, FULL_QUEUE, ServerLog, load_failure
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.server import TritonServer, runs
from wire.events import Event, Loading, ModelDown, ModelUp
from wire.refusal import RefusalCode, parse_refusal

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_NEEDED_INTERVAL_S = 0.25
"""Between two checks whether the entry that this one needs is loaded."""
_CALL_TIMEOUT_S = 5.0
_MISSES = 3
"""Failed probes in a row. Several, because a busy machine answers late; a full engine answers at once."""
_LONGEST_HEARTBEAT_AGE_S = 60.0
"""Far longer than any engine step: the longest is a chunk of prefill on a busy CPU."""
_ABSENT_LIMIT = 10
"""Checks in a row, one per second, that find no process of an entry being loaded."""
_FIRST_TOKEN_TIMEOUT_S = 300.0
_UNLOAD_TIMEOUT_S = 2.0
_SERVER_DEATH_S = 1.5
"""How long to wait after a failed call for a sign that the server died, before the entry is blamed."""


class EntryState(enum.Enum):
    """The state of an entry."""

    LOADING = enum.auto()
    UP = enum.auto()
    DOWN = enum.auto()
    """It failed and is being repaired."""
    UNLOADED = enum.auto()
    """It was unloaded through Triton's API, and is left alone until it is loaded through it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A repository entry."""

    name: str
    model: str
    engine: bool
    """Whether it runs an engine, which answers probes."""
    needs: str | None = None
    """The entry that must be loaded before this one can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """State shared by the watchers during one life of the server."""

    server: TritonServer
    client: TritonClient
    run: RunDirectory
    log: ServerLog
    emit: Callable[[Event], None]
    over: threading.Event
    """Set when this life of the server ends."""
    loading: threading.Lock
    """Held by the engine that loads: peak memory is one checkpoint's, and the log has one progress bar."""


class EntryWatcher:
    """Loads the entry, then probes it; an entry that died or is stuck is unloaded and loaded again.

    `failure` is set, and the watcher ends, when the first load fails and `must_load` is true (a `LoadError`),
    or when only a new server can help (a `ServerError`).
    """

    def __init__(self, entry: Entry, surroundings: Surroundings, *, must_load: bool) -> None:
        self.state = EntryState.LOADING
        self.failure: LoadError | ServerError | None = None
        self._entry = entry
        self._around = surroundings
        self._must_load = must_load
        self._backoff = Backoff()
        self._stubs: list[psutil.Process] = []
        self._thread = threading.Thread(target=self._run, name=f"watch-{entry.name}", daemon=True)

    def start(self) -> None:
        """Begin, in a thread that ends when the server's life is over."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._load()
                    self._came_up()
                    fault = self._watch()
                    self._end_needed()
                except LoadError as error:
                    fault = str(error)
                    if not error.by_server:
                        # A dying server makes calls fail before its death is noticed: not the entry's fault.
                        self._pause(_SERVER_DEATH_S)
                    if self._must_load and self.state is EntryState.LOADING:
                        self.failure = LoadError(f"{self._entry.name}: {fault}")
                        return
                self._went_down(fault)
                self._clear()
                self._pause(self._backoff.failed())
        except StoppedError:
            return
        except ServerError as error:
            self.failure = error
        except Exception as error:
            if self._around.over.is_set():
                return  # The client was closed during a call, which can fail in any way.
            # The thread would end silently otherwise, and nobody would watch the entry any more.
            logger.exception("watching %s", self._entry.name)
            self.failure = ServerError(f"watching {self._entry.name} failed: {error!r}")

    def _came_up(self) -> None:
        if self.state is EntryState.DOWN:
            self._around.emit(ModelUp(self._entry.model))
        logger.info("%s is up", self._entry.name)
        self.state = EntryState.UP

    def _went_down(self, fault: str) -> None:
        logger.warning("%s is down: %s", self._entry.name, fault)
        self.state = EntryState.DOWN
        self._around.emit(ModelDown(self._entry.model, f"{self._entry.name}: {fault}"))

    def _end_needed(self) -> None:
        """Called when this entry's process died: kill that of the entry it needs, whose watcher reloads it.

        For each answer on its way to the dead process, Triton waits for ever, and so blocks the sender
        threads of the other entry: that entry can no longer answer anybody.
        """
        if self._entry.needs is not None:
            self._kill_stubs(self._entry.needs)

    def _load(self) -> None:
        """Load the entry; for an engine, wait until it has generated a token, too.

        Raises:
            LoadError: Triton refused, or the entry does not answer.
            ServerError: the load will never end.
            StoppedError: the server's life is over.
        """
        entry, around = self._entry, self._around
        if entry.engine:
            while not around.loading.acquire(timeout=0.25):
                self._pause(0)
            try:
                self._await_load()
            finally:
                around.loading.release()
            self._await_first_token()
        else:
            if entry.needs is not None:
                self._await_ready(entry.needs, _NEEDED_INTERVAL_S)
            self._await_load()
        self._stubs = around.server.stubs(entry.name)

    def _await_first_token(self) -> None:
        try:
            self._around.client.generate(self._entry.name, _FIRST_TOKEN_TIMEOUT_S)
        except CallError as error:
            refusal = parse_refusal(str(error))
            # Clients have filled the queue already: an engine that works for them needs no repair.
            if refusal is None or refusal[0] is not RefusalCode.QUEUE_FULL:
                raise

    def _await_load(self) -> None:
        entry, around = self._entry, self._around
        if entry.engine:
            around.log.reset_progress()
            around.emit(Loading(entry.model, 0.0))
        started = time.monotonic()
        absent = 0
        try:
            with around.run.claim_environments():
                call = around.client.load(entry.name)
                while not call.wait(_INTERVAL_S):
                    self._pause(0)
                    if entry.engine:
                        elapsed_s = round(time.monotonic() - started, 1)
                        around.emit(Loading(entry.model, elapsed_s, around.log.progress))
                    # Triton waits for ever for a stub that dies before it has reported to Triton.
                    absent = 0 if around.server.stubs(entry.name) else absent + 1
                    if absent == _ABSENT_LIMIT:
                        raise ServerError(f"{entry.name}: its process died before it began to load")
        except CallError as error:
            raise LoadError(load_failure(str(error), around.log), by_server=error.by_server) from error

    def _watch(self) -> str:
        """Watch the entry until something is wrong with it; return what is wrong.

        Raises:
            StoppedError: the server's life is over.
        """
        misses = 0
        while True:
            self._pause(_INTERVAL_S)
            fault, certain = self._examine()
            if fault is None:
                misses = 0
                continue
            if self._out_of_our_hands():
                self._await_return()
                misses = 0
                continue
            misses += 1
            if certain or misses >= _MISSES:
                return fault

    def _examine(self) -> tuple[str | None, bool]:
        """Return what is wrong (None: nothing), and whether a single check is sufficient proof."""
        name = self._entry.name
        if not any(runs(stub) for stub in self._stubs):
            # On the next request, Triton itself restarts the stub of an entry that is not decoupled.
            self._stubs = self._around.server.stubs(name)
            if not self._stubs:
                return "its process died", True
        if not self._entry.engine:
            return None, False
        try:
            report = self._around.client.probe(name, _CALL_TIMEOUT_S)
        except CallError as error:
            if error.timed_out:
                return f"no answer to a probe within {_CALL_TIMEOUT_S:.0f} s", False
            if FULL_QUEUE in str(error):
                self._pause(_CALL_TIMEOUT_S)  # Busy, not dead: wait as long as for no answer.
            return f"a probe was refused: {error}", DEAD_STUB in str(error)
        if report.heartbeat_age_s > _LONGEST_HEARTBEAT_AGE_S:
            return f"its engine has not moved for {report.heartbeat_age_s:.0f} s", True
        return None, False

    def _out_of_our_hands(self) -> bool:
        """Whether the entry does not answer because a client of Triton's API unloaded or is loading it."""
        try:
            state = self._around.client.state(self._entry.name, _CALL_TIMEOUT_S)
        except CallError:
            return False
        return state.unloaded or state.state in {"LOADING", "UNLOADING"}

    def _await_return(self) -> None:
        """Wait until an entry that was unloaded through Triton's API is ready again."""
        self.state = EntryState.UNLOADED
        logger.info("%s was unloaded by somebody", self._entry.name)
        self._await_ready(self._entry.name, _INTERVAL_S)
        self._stubs = self._around.server.stubs(self._entry.name)
        self.state = EntryState.UP

    def _await_ready(self, name: str, interval_s: float) -> None:
        while True:
            self._pause(interval_s)
            try:
                state = self._around.client.state(name, _CALL_TIMEOUT_S)
            except CallError:  # probably the server died; the supervisor handles that
                continue
            if state.state == "READY":
                return

    def _clear(self) -> None:
        """Unload an entry that failed: loading does nothing while Triton considers the entry ready.

        Streams that were running on a dead stub never end, so its instance remains UNLOADING until the server
        stops. But it holds no model any more, and a load creates a new instance: the wait can be short.
        """
        name, client = self._entry.name, self._around.client
        # A stuck stub would delay its own unloading, and keep its memory beside the new stub's.
        self._kill_stubs(name)
        deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
        try:
            client.unload(name, _CALL_TIMEOUT_S)
            while not client.state(name, _CALL_TIMEOUT_S).gone and time.monotonic() < deadline:
                self._pause(0.25)
        except CallError as error:
            logger.warning("unloading %s: %s", name, error)

    def _kill_stubs(self, name: str) -> None:
        for stub in self._around.server.stubs(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                stub.kill()

    def _pause(self, seconds: float) -> None:
        if self._around.over.wait(seconds):
            raise StoppedError
