"""Loads one repository entry: asks Triton to, and looks after the entry's process until it answers."""

import logging
import time

from triton_models.embedded.client import CallError, PendingCall
from triton_models.embedded.entry import Entry, Surroundings
from triton_models.embedded.errors import GivenUpError, LoadError, ServerError
from triton_models.embedded.log import load_failure
from wire.events import Loading
from wire.refusal import RefusalCode, parse_refusal

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_NEEDED_INTERVAL_S = 0.25
"""Between two checks whether the entry that this one needs is loaded."""
_ABSENT_LIMIT = 10
"""Checks in a row, one per second, that find no process of an entry being loaded."""
_UNASKED_LIMIT = 10
"""Checks in a row that find every process of an entry initialized, and none of them asked anything, before
Triton has answered. That usually takes milliseconds."""
_FIRST_TOKEN_TIMEOUT_S = 300.0


class EntryLoad:
    """Loads `entry` into the server of `around`, once for each call of `run`."""

    def __init__(self, entry: Entry, around: Surroundings) -> None:
        self._entry = entry
        self._around = around

    def run(self) -> None:
        """Load the entry; for an engine, wait until it has generated a token, too.

        Raises:
            GivenUpError: Triton took the process for dead while that was starting.
            LoadError: Triton refused, or the entry does not answer.
            ServerError: the load will never end.
            StoppedError: the server's life is over.
        """
        entry, around = self._entry, self._around
        if entry.engine:
            while not around.loading.acquire(timeout=0.25):
                around.pause(0)
            try:
                self._await_load()
            finally:
                around.loading.release()
            self._await_first_token()
        else:
            if entry.needs is not None:
                around.await_ready(entry.needs, _NEEDED_INTERVAL_S)
            self._await_load()

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
        started = time.monotonic()
        around.log.forget(entry.name)
        if entry.engine:
            around.log.reset_progress()
            around.emit(Loading(entry.model, 0.0))
        try:
            with around.run.claim_environments():
                self._look_after(around.client.load(entry.name), started)
        except CallError as error:
            raise LoadError(load_failure(str(error), around.log), by_server=error.by_server) from error

    def _look_after(self, call: PendingCall, started: float) -> None:
        entry, around = self._entry, self._around
        absent = unasked = 0
        given_up = False
        try:
            while not call.wait(_INTERVAL_S):
                around.pause(0)
                if entry.engine:
                    elapsed_s = round(time.monotonic() - started, 1)
                    around.emit(Loading(entry.model, elapsed_s, around.log.progress))
                stubs = around.server.stubs(entry.name)
                # Triton waits for ever for a stub that dies before it has reported to Triton.
                absent = 0 if stubs else absent + 1
                if absent == _ABSENT_LIMIT:
                    raise ServerError(f"{entry.name}: its process is gone, and Triton goes on waiting for it")
                # And for ever for the end of a stub that it gave up, because that had not run for a second.
                idle = stubs and all(around.log.unasked(entry.name, stub.pid) for stub in stubs)
                unasked = unasked + 1 if idle else 0
                if unasked == _UNASKED_LIMIT:
                    given_up = True
                    logger.warning("%s: Triton has given its process up", entry.name)
                    around.server.kill_stubs(entry.name)
        except CallError as error:
            if given_up and error.by_server:
                raise GivenUpError from error
            raise
