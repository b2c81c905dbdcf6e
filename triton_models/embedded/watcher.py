"""Keeps one repository entry of one server loaded and answering, in its own thread."""

import logging
import threading
import time
from typing import TYPE_CHECKING

from triton_models.embedded.backoff import Backoff
from triton_models.embedded.client import CallError
from triton_models.embedded.entry import CALL_TIMEOUT_S, Entry, EntryState, Surroundings
from triton_models.embedded.errors import GivenUpError, LoadError, ServerError, StoppedError
from triton_models.embedded.load import EntryLoad
from triton_models.embedded.log import DEAD_STUB, FULL_QUEUE
from triton_models.embedded.server import runs
from wire.events import ModelDown, ModelUp

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MISSES = 3
"""Failed probes in a row. Several, because a busy machine answers late; a full engine answers at once."""
_LONGEST_HEARTBEAT_AGE_S = 60.0
"""Far longer than any engine step: the longest is a chunk of prefill on a busy CPU."""
_UNLOAD_TIMEOUT_S = 2.0
_SERVER_DEATH_S = 10.0
"""How long to wait after a failed call for a sign that the server died, before the entry is blamed. Its
warden's end is that sign, and comes after the end of all stubs, which may hold much memory."""
_FIRST_ATTEMPTS = 3
"""Attempts at a first load while Triton gives up its process each time."""


class EntryWatcher:
    """Loads the entry, then probes it; an entry that died or is stuck is unloaded and loaded again.

    `failure` is set, and the watcher ends, when the first load fails and `must_load` is true (a `LoadError`),
    or when only a new server can help (a `ServerError`). A load whose process Triton gave up has failed only
    after the third attempt.
    """

    def __init__(self, entry: Entry, surroundings: Surroundings, *, must_load: bool) -> None:
        self.state = EntryState.LOADING
        self.failure: LoadError | ServerError | None = None
        self._entry = entry
        self._around = surroundings
        self._load = EntryLoad(entry, surroundings)
        self._must_load = must_load
        self._given_up = 0
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
                    self._load.run()
                    self._came_up()
                    fault = self._watch()
                    self._end_needed()
                except LoadError as error:
                    fault = str(error)
                    if not error.by_server:
                        # A dying server makes calls fail before its death is noticed: not the entry's fault.
                        self._around.pause(_SERVER_DEATH_S)
                    self._given_up += isinstance(error, GivenUpError)
                    again = isinstance(error, GivenUpError) and self._given_up < _FIRST_ATTEMPTS
                    if self._must_load and not again:
                        self.failure = LoadError(f"{self._entry.name}: {fault}")
                        return
                self._went_down(fault)
                self._clear()
                self._around.pause(self._backoff.failed())
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
        self._stubs = self._around.server.stubs(self._entry.name)
        self._must_load = False
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
            self._around.server.kill_stubs(self._entry.needs)

    def _watch(self) -> str:
        """Watch the entry until something is wrong with it; return what is wrong.

        Raises:
            StoppedError: the server's life is over.
        """
        misses = 0
        while True:
            self._around.pause(_INTERVAL_S)
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
            report = self._around.client.probe(name, CALL_TIMEOUT_S)
        except CallError as error:
            if error.timed_out:
                return f"no answer to a probe within {CALL_TIMEOUT_S:.0f} s", False
            if FULL_QUEUE in str(error):
                self._around.pause(CALL_TIMEOUT_S)  # Busy, not dead: wait as long as for no answer.
            return f"a probe was refused: {error}", DEAD_STUB in str(error)
        if report.heartbeat_age_s > _LONGEST_HEARTBEAT_AGE_S:
            return f"its engine has not moved for {report.heartbeat_age_s:.0f} s", True
        return None, False

    def _out_of_our_hands(self) -> bool:
        """Whether the entry does not answer because a client of Triton's API unloaded or is loading it."""
        try:
            state = self._around.client.state(self._entry.name, CALL_TIMEOUT_S)
        except CallError:
            return False
        return state.unloaded or state.state in {"LOADING", "UNLOADING"}

    def _await_return(self) -> None:
        """Wait until an entry that was unloaded through Triton's API is ready again."""
        self.state = EntryState.UNLOADED
        logger.info("%s was unloaded by somebody", self._entry.name)
        self._around.await_ready(self._entry.name, _INTERVAL_S)
        self._stubs = self._around.server.stubs(self._entry.name)
        self.state = EntryState.UP

    def _clear(self) -> None:
        """Unload an entry that failed: loading does nothing while Triton considers the entry ready.

        Streams that were running on a dead stub never end, so its instance remains UNLOADING until the server
        stops. But it holds no model any more, and a load creates a new instance: the wait can be short.
        """
        name, client = self._entry.name, self._around.client
        # A stuck stub would delay its own unloading, and keep its memory beside the new stub's.
        self._around.server.kill_stubs(name)
        deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
        try:
            client.unload(name, CALL_TIMEOUT_S)
            while not client.state(name, CALL_TIMEOUT_S).gone and time.monotonic() < deadline:
                self._around.pause(0.25)
        except CallError as error:
            logger.warning("unloading %s: %s", name, error)
