"""A repository entry, and what those who load and watch it share during one life of the server."""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

from triton_models.embedded.client import CallError, TritonClient
from triton_models.embedded.errors import StoppedError
from triton_models.embedded.log import ServerLog
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.server import TritonServer
from wire.events import Event

CALL_TIMEOUT_S = 5.0
"""For calls that Triton answers at once, if it is well."""


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

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            StoppedError: this life of the server is over.
        """
        if self.over.wait(seconds):
            raise StoppedError

    def await_ready(self, name: str, interval_s: float) -> None:
        """Wait until Triton calls the entry `name` ready, asking every `interval_s` seconds.

        Raises:
            StoppedError: this life of the server is over.
        """
        while True:
            self.pause(interval_s)
            try:
                state = self.client.state(name, CALL_TIMEOUT_S)
            except CallError:  # probably the server died; the supervisor handles that
                continue
            if state.state == "READY":
                return
