"""The thread that runs an engine's steps and passes on their outputs."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from triton_models.engine.beams import BeamRequest, BeamSearches
from triton_models.engine.engine import Engine, EngineStats, StepStats
from triton_models.engine.sequence import FinishReason, Request, TokenOutput

log = logging.getLogger(__name__)

_T = TypeVar("_T")

IDLE_TURN_SECONDS = 0.5
"""How often an idle loop iterates, to keep its heartbeat fresh."""


class EngineLoop:
    """Runs an engine on a thread of its own; every method may be called from any thread.

    `on_outputs` and `on_step` are called on that thread, at most once per step, and must be quick. A step
    that raises fails the requests that ran in it; after `failure_limit` such steps in a row the loop
    stops. However it stops, every open request gets its final output first.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_outputs: Callable[[list[TokenOutput]], None],
        on_step: Callable[[StepStats], None],
    ) -> None:
        self._engine = engine
        self._searches = BeamSearches(engine)
        self._on_outputs = on_outputs
        self._on_step = on_step
        self._wake = threading.Event()
        self._stopping = False
        self._failures = 0
        self._heartbeat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def heartbeat(self) -> float:
        """Monotonic seconds of the last iteration; old only if a step is slow or the loop has ended."""
        return self._heartbeat

    @property
    def alive(self) -> bool:
        """True while the loop runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End every open request with SHUTDOWN and join the thread, which ends after its current step."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def add(self, *requests: Request | BeamRequest) -> None:
        """Add requests, all or none; raises at once what `BeamSearches.add` raises."""
        self._searches.add(*requests)
        self._wake.set()

    def cancel(self, request_id: str) -> bool:
        """Cancel a request between two steps, or the search whose answer it is; False if it is not open."""
        found = self._searches.cancel(request_id)
        self._wake.set()
        return found

    def stats(self) -> EngineStats:
        """Return the current counts."""
        return self._engine.stats()

    def _run(self) -> None:
        reason, error = FinishReason.FAULT, "the engine has stopped after a fault"
        try:
            while not self._stopping and self._failures < self._engine.settings.failure_limit:
                self._heartbeat = time.monotonic()
                # Cleared before looking for work, so that `wait` notices what arrives meanwhile.
                self._wake.clear()
                if not self._turn():
                    self._wake.wait(IDLE_TURN_SECONDS)
            if self._stopping:
                reason, error = FinishReason.SHUTDOWN, "the engine was stopped"
            else:
                log.critical("the engine stops after %d failed steps in a row", self._failures)
        except Exception:
            # The outermost frame of the thread: not even the recovery from a failed step worked.
            log.critical("the engine stops", exc_info=True)
        finally:
            self._engine.shut_down(reason, error)
            self._deliver()

    def _turn(self) -> bool:
        """Run one step and pass on its outputs; False if there was nothing to compute."""
        try:
            stats = self._engine.step()
        except Exception:
            # The outermost frame of all running requests: whatever failed, they end with an error, and the
            # waiting ones get their turn.
            log.exception("an engine step failed")
            self._failures += 1
            self._engine.fail_running("the engine failed in this step")
            self._deliver()
            return True
        self._deliver()
        if stats is None:
            return False
        self._failures = 0
        self._call(self._on_step, stats)
        return True

    def _deliver(self) -> None:
        outputs = self._searches.take_outputs()
        if outputs:
            self._call(self._on_outputs, outputs)

    def _call(self, callback: Callable[[_T], None], argument: _T) -> None:
        try:
            callback(argument)
        except Exception:
            # The boundary to foreign code: its faults must not affect the engine's other requests.
            log.exception("a callback of the engine failed")
