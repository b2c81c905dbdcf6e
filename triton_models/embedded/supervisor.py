"""Keeps one tritonserver and its models running until it is cancelled: one loop, in it one task a model."""

import asyncio
import contextlib
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Never

from triton_models.embedded.client import TritonClient
from triton_models.embedded.errors import EmbeddedError, ModelError, ServerError
from triton_models.embedded.server import ERROR, HOST, PROGRESS, SIZE, ServerLog, TritonServer
from triton_models.embedded.warden import command_line, kill
from wire.events import Event, Live, Loading, ModelDown, ModelUp, Ready, ServerDown, ServerUp, Starting

_INTERVAL_S = 1.0
"""Between two probes of a model, and between two reports about its load."""
_CHECKS = 4
"""Of a model's process, in that interval: the death of one is known sooner than its silence."""
_CALL_TIMEOUT_S = 5.0
"""For calls that Triton answers at once, if it is well."""
_FIRST_PROBE_TIMEOUT_S = 60.0
_MISSES = 3
"""Failed probes in a row. Several, because a busy machine answers late; a full engine answers at once."""
_LONGEST_HEARTBEAT_AGE_S = 60.0
"""Far longer than any engine step: the longest is a chunk of prefill on a busy CPU."""
_LIVE_MISSES = 6
"""Unanswered calls in a row, half a minute in all, after which the server is taken to hang."""
_SERVER_DEATH_S = 10.0
"""How long to wait after a failed call for a sign that the server died, before the model is blamed. Its
warden's end is that sign, and comes after the end of all stubs, which may hold much memory."""
_ABSENT_LIMIT = 10
"""Checks in a row, one per second, that find no process of a model being loaded."""
_CANCEL_S = 0.2
_FIRST_ATTEMPTS = 3
"""Before everything is ready: at the server while it crashes, at a model while its process dies."""

_SHORTEST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STABLE_S = 60.0

_DEAD_STUB = "is not healthy"
"""Part of Triton's answer for a model whose stub died; it goes on reporting such a model as ready."""
_DIED_LOADING = "its process died while loading; is there enough memory?"
_LOAD_FAILURE = re.compile(r"is at UNAVAILABLE state: (?:Internal: )?(.*)", re.DOTALL)
_TRACEBACK = re.compile(r"\s+At:\n.*", re.DOTALL)


class Backoff:
    """Pauses: none, then from 0.5 s doubled up to 30 s; they start over after a minute without a failure."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._failed_at = -_STABLE_S

    def failed(self) -> float:
        """Record a failure; return the seconds to wait before the next attempt."""
        now = time.monotonic()
        calm = now - self._failed_at >= _STABLE_S + self._pause
        self._pause = 0.0 if calm else min(max(2 * self._pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self._failed_at = now
        return self._pause


@dataclass(slots=True)
class _Model:
    name: str
    """Also its repository entry's."""
    at_start: bool = True
    """Whether it is loaded with the server; else somebody loads it by Triton's API."""
    up: bool = False
    """It answered a probe after its last load."""
    deaths: int = 0
    """First loads that ended with their process."""
    stubs: set[int] = field(default_factory=set)
    backoff: Backoff = field(default_factory=Backoff)


class Supervisor:
    """Starts the server and its models, and restarts whatever dies.

    The first start must succeed as a whole, apart from what is worth another attempt: a server that crashed,
    a process that died while it loaded. From `Ready` on, every failure is repaired.

    Args:
        server: not yet started.
        models: names of the repository entries to serve.
        emit: told everything that happens.
        at_start: how many of them to load, the first ones; None: all. Each of them is repaired once it was
            loaded, whoever did it.
    """

    def __init__(
        self,
        server: TritonServer,
        models: Sequence[str],
        emit: Callable[[Event], None],
        *,
        at_start: int | None = None,
    ) -> None:
        self._server = server
        self._models = [
            _Model(name, at_start=at_start is None or number < at_start) for number, name in enumerate(models)
        ]
        self._emit = emit
        self._ready = False
        self._loading = asyncio.Lock()
        """Held by the model that loads: peak memory is one checkpoint's, and the log has one progress bar."""

    async def run(self) -> Never:
        """Supervise until cancelled; on return, nothing of the server remains. For the main thread.

        Raises:
            ServerError: a requested port is in use, the server did not start, or died before it was ready.
            ModelError: a model could not be loaded at the first start.
        """
        self._emit(Starting(str(self._server.log.path)))
        backoff, failures, live = Backoff(), 0, False
        while True:
            try:
                client = await self._server.start()
                if failures:
                    self._emit(ServerUp())
                if not live:
                    self._emit(Live(**self._addresses()))
                    live = True
                await self._live(client)
            except ServerError as error:
                failures += 1
                if not (self._ready or (error.transient and failures < _FIRST_ATTEMPTS)):
                    raise
                pause = backoff.failed()
                down = ServerDown(str(error), pause)
            finally:
                self._server.stop()
            self._emit(down)
            await asyncio.sleep(pause)

    def _addresses(self) -> dict[str, str]:
        return {name: f"{HOST}:{port}" for name, port in self._server.ports._asdict().items()}

    async def _live(self, client: TritonClient) -> Never:
        """Watch one life of the server.

        Raises:
            ServerError: it ended, or hangs, or only a new one can help a model.
            ModelError: a model could not be loaded at the first start.
        """
        tasks = [asyncio.create_task(self._keep(client, model)) for model in self._models]
        tasks.append(asyncio.create_task(self._watch_server(client)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            while not all(task.done() for task in tasks):
                for task in tasks:
                    task.cancel()  # repeated: a call that is cancelled may end with another error
                await asyncio.wait(tasks, timeout=_CANCEL_S)
            await asyncio.gather(*tasks, return_exceptions=True)  # else these errors would be logged
            await client.aclose()
        error = done.pop().exception()
        if isinstance(error, EmbeddedError):
            raise error
        traceback.print_exception(error)
        raise ServerError(f"watching failed: {error!r}")

    async def _watch_server(self, client: TritonClient) -> Never:
        """Raise a ServerError when the server has died or hangs."""
        misses = 0
        while True:
            if (end := self._server.end()) is not None:
                raise end
            misses = 0 if await client.live(_CALL_TIMEOUT_S) else misses + 1
            if misses >= _LIVE_MISSES:
                raise ServerError("tritonserver does not answer")
            self._server.log.trim()
            await asyncio.sleep(_INTERVAL_S / _CHECKS)

    async def _keep(self, client: TritonClient, model: _Model) -> Never:
        """Load the model, if that is not left to others, and probe it; one that died or is stuck is reloaded.

        Raises:
            ModelError: a load failed at the first start.
            ServerError: only a new server can help.
        """
        model.up = down = False
        while True:
            try:
                if model.at_start or down:
                    await self._load(client, model, again=down)
                    model.up = True
                if down:
                    self._emit(ModelUp(model.name))
                if not self._ready and all(each.up or not each.at_start for each in self._models):
                    self._ready = True
                    names = [each.name for each in self._models]
                    self._emit(Ready(**self._addresses(), repository_key=self._server.key, models=names))
                fault = await self._watch(client, model)
            except ModelError as error:
                fault = str(error)
                if not await client.live(_CALL_TIMEOUT_S):
                    # A dying server makes calls fail before its death is noticed: not the model's fault.
                    await asyncio.sleep(_SERVER_DEATH_S)
                model.deaths += fault == _DIED_LOADING
                if not self._ready and (fault != _DIED_LOADING or model.deaths == _FIRST_ATTEMPTS):
                    raise ModelError(f"{model.name}: {fault}") from error
            model.up, down = False, True
            self._emit(ModelDown(model.name, fault))
            # A stuck stub would delay its own unloading, and keep its memory beside the new stub's.
            model.stubs = self._server.stubs(model.name)
            kill(model.stubs)
            await asyncio.sleep(model.backoff.failed())

    async def _load(self, client: TritonClient, model: _Model, *, again: bool) -> None:
        """Load the model, `again` after it failed, and wait until its engine has answered a probe.

        Raises:
            ModelError: Triton refused, or the model does not answer.
            ServerError: the load will never end.
        """
        async with self._loading:
            started, absent = time.monotonic(), 0
            self._emit(Loading(model.name, 0.0))
            self._server.log.mark()
            if again:
                await self._clear(client, model)
            call = asyncio.create_task(client.load(model.name))
            try:
                while not (await asyncio.wait({call}, timeout=_INTERVAL_S))[0]:
                    elapsed_s = round(time.monotonic() - started, 1)
                    percent = self._server.log.last(PROGRESS)
                    read = None if percent is None else min(int(percent), 100) / 100
                    size = self._server.log.last(SIZE)
                    self._emit(Loading(model.name, elapsed_s, read, None if size is None else f"{size}B"))
                    # Triton waits for ever for a stub that dies before it has reported to Triton.
                    absent = 0 if self._server.stubs(model.name) else absent + 1
                    if absent == _ABSENT_LIMIT:
                        raise ServerError(f"{model.name}: its process is gone, and Triton waits for it")
                await call
            except ModelError as error:
                raise ModelError(load_failure(str(error), self._server.log)) from error
            finally:
                call.cancel()
        await client.probe(model.name, _FIRST_PROBE_TIMEOUT_S)
        model.stubs = self._server.stubs(model.name)

    async def _watch(self, client: TritonClient, model: _Model) -> str:
        """Watch the model until something is wrong with it; return what is wrong."""
        misses, unloaded = 0, False
        while True:
            fault, certain = await self._examine(client, model)
            if fault is None:
                misses, unloaded = 0, False
                continue
            try:
                # A client of Triton's API may have unloaded it, or be loading it, or have failed to, which it
                # was told: then it is left alone.
                unloaded = await client.unloaded(model.name, _CALL_TIMEOUT_S)
            except ModelError:
                certain = False  # Triton did not say; until it does, what it said last holds
            misses = 0 if unloaded else misses + 1
            if misses >= _MISSES or (misses and certain):
                return fault

    async def _examine(self, client: TritonClient, model: _Model) -> tuple[str | None, bool]:
        """Return what is wrong (None: nothing), and whether a single check is sufficient proof."""
        for _ in range(_CHECKS):
            await asyncio.sleep(_INTERVAL_S / _CHECKS)
            if not any(map(command_line, model.stubs)):
                model.stubs = self._server.stubs(model.name)  # somebody may have loaded it anew
                if not model.stubs:
                    return "its process died", True
        try:
            report = await client.probe(model.name, _CALL_TIMEOUT_S)
        except ModelError as error:
            return f"a probe failed: {error}", _DEAD_STUB in str(error)
        if report.heartbeat_age_s > _LONGEST_HEARTBEAT_AGE_S:
            return f"its engine has not moved for {report.heartbeat_age_s:.0f} s", True
        return None, False

    async def _clear(self, client: TritonClient, model: _Model) -> None:
        """Unload a model that failed: loading does nothing while Triton considers it ready.

        Only right before it is loaded: in the pause, and while others load, Triton calls it dead, and not
        unloaded as if somebody had meant it. One that somebody has loaded meanwhile stays.

        Streams that were running on a dead stub never end, so its instance remains UNLOADING until the server
        stops. But it holds no memory any more, and a load creates a new instance.
        """
        if self._server.stubs(model.name) <= model.stubs:
            with contextlib.suppress(ModelError):  # the load will say what is wrong
                await client.unload(model.name, _CALL_TIMEOUT_S)


def load_failure(message: str, log: ServerLog) -> str:
    """Return why Triton could not load a model, in one line without a traceback."""
    found = _LOAD_FAILURE.search(message)
    if found is not None:
        message = found[1]
    elif (error := log.last(ERROR)) is not None:
        message = f"{message}: {error}"
    if _DEAD_STUB in message:
        return _DIED_LOADING
    return " ".join(_TRACEBACK.sub("", message).split()).rstrip(";")
