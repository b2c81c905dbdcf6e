"""Keeps one tritonserver and its models running until it is told to stop."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from triton_models.embedded import ports
from triton_models.embedded.backoff import Backoff
from triton_models.embedded.client import TritonClient
from triton_models.embedded.entry import Entry, EntryState, Surroundings
from triton_models.embedded.errors import PortInUseError, ServerError, StoppedError
from triton_models.embedded.installation import Installation
from triton_models.embedded.log import ServerLog
from triton_models.embedded.models import Served
from triton_models.embedded.ports import HOST, Ports
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.server import TritonServer
from triton_models.embedded.watcher import EntryWatcher
from wire.events import Event, Ready, ServerDown, ServerUp, Starting

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LIVE_TIMEOUT_S = 5.0
_LIVE_MISSES = 6
"""Unanswered calls in a row, half a minute in all, after which the server is taken to hang."""
_PORT_ATTEMPTS = 3
_EARLY_CRASHES = 2
"""Most crashes before everything is ready that are answered by another start."""
_JOIN_S = 1.0


class Supervisor:
    """Starts the server and its models, and restarts whatever dies.

    The first start must succeed as a whole, apart from what is worth another attempt: a server that crashed,
    a process that Triton gave up. From `Ready` on, every failure is repaired.
    """

    def __init__(
        self,
        *,
        installation: Installation,
        run: RunDirectory,
        repository: Path,
        models: list[Served],
        asked_ports: Ports,
        log: ServerLog,
        emit: Callable[[Event], None],
        arguments: Sequence[str] = (),
    ) -> None:
        self._installation = installation
        self._run_directory = run
        self._repository = repository
        self._models = models
        self._asked_ports = asked_ports
        self._log = log
        self._emit = emit
        self._arguments = arguments
        self._ready = False

    def run(self, stop: threading.Event) -> None:
        """Supervise until `stop` is set; on return, nothing of the server remains. For the main thread.

        Raises:
            PortInUseError: a requested port is in use.
            ServerError: the server did not start, or died before it was ready.
            LoadError: a model could not be loaded at the first start.
        """
        self._emit(Starting(str(self._log.path)))
        backoff = Backoff()
        early_crashes = 0
        try:
            server, client = self._first_start(stop)
        except StoppedError:
            return
        try:
            while True:
                reason = self._live(server, client, stop)
                crashed = server.crashed
                early_crashes += crashed
                server.kill()
                if not self._ready and not (crashed and early_crashes <= _EARLY_CRASHES):
                    raise ServerError(reason)
                client = self._restart(server, reason, backoff, stop)
        except StoppedError:
            return
        finally:
            server.stop()

    def _first_start(self, stop: threading.Event) -> tuple[TritonServer, TritonClient]:
        """Start the server on the requested ports; if any is ours to choose, retry with other choices."""
        attempts = _PORT_ATTEMPTS if self._asked_ports.any_free else 1
        while True:
            attempts -= 1
            chosen = ports.choose(self._asked_ports)
            server = TritonServer(
                self._installation,
                self._run_directory,
                self._repository,
                chosen,
                self._log,
                arguments=self._arguments,
            )
            try:
                return server, server.start(stop)
            except ServerError:
                # Another process can take a free port after we choose it and before the server binds it.
                if not attempts or not _taken(chosen):
                    raise

    def _restart(
        self, server: TritonServer, reason: str, backoff: Backoff, stop: threading.Event
    ) -> TritonClient:
        while True:
            pause = backoff.failed()
            logger.warning("tritonserver is down: %s", reason)
            self._emit(ServerDown(reason, pause))
            if stop.wait(pause):
                raise StoppedError
            try:
                client = server.start(stop)
            except ServerError as error:
                if not self._ready:
                    raise
                reason = str(error)
                continue
            self._emit(ServerUp())
            return client

    def _live(self, server: TritonServer, client: TritonClient, stop: threading.Event) -> str:
        """Watch one life of the server; return the reason why it ended.

        Raises:
            LoadError: a model could not be loaded at the first start.
            StoppedError: `stop` was set.
        """
        around = Surroundings(
            server=server,
            client=client,
            run=self._run_directory,
            log=self._log,
            emit=self._emit,
            over=threading.Event(),
            loading=threading.Lock(),
        )
        watchers = [
            EntryWatcher(
                Entry(
                    name=name,
                    model=model.name,
                    engine=name == model.stream,
                    needs=model.stream if name in model.dependents else None,
                ),
                around,
                must_load=not self._ready,
            )
            for model in self._models
            for name in model.entries
        ]
        for watcher in watchers:
            watcher.start()
        try:
            return self._watch(server, client, watchers, stop)
        finally:
            around.over.set()
            client.close()  # makes the calls that the watchers wait for fail
            for watcher in watchers:
                watcher.join(_JOIN_S)

    def _watch(
        self, server: TritonServer, client: TritonClient, watchers: list[EntryWatcher], stop: threading.Event
    ) -> str:
        misses = 0
        while not stop.wait(_INTERVAL_S):
            if not server.alive():
                return server.end_reason()
            misses = 0 if client.live(_LIVE_TIMEOUT_S) else misses + 1
            if misses >= _LIVE_MISSES:
                return "tritonserver does not answer"
            for watcher in watchers:
                if isinstance(watcher.failure, ServerError):
                    return str(watcher.failure)
                if watcher.failure is not None:
                    raise watcher.failure
            if not self._ready and all(watcher.state is EntryState.UP for watcher in watchers):
                self._ready = True
                self._emit(self._ready_event(server.ports))
        raise StoppedError

    def _ready_event(self, chosen: Ports) -> Ready:
        return Ready(
            grpc=f"{HOST}:{chosen.grpc}",
            http=f"{HOST}:{chosen.http}",
            metrics=f"{HOST}:{chosen.metrics}",
            models=[model.name for model in self._models],
        )


def _taken(chosen: Ports) -> bool:
    try:
        ports.choose(chosen)
    except PortInUseError:
        return True
    return False
