"""Loads and unloads models on one or many Tritons.

A model is one entry. It is unloaded only after its requests in flight have ended. Loading a loaded entry
would put a second copy of its weights into memory, so a reload unloads first.

Knows nothing of HTTP or of permissions.
"""

import asyncio
import contextlib
import enum
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any

from gateway.core.upstream import EntriesChanged
from gateway.errors import (
    ConflictError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.triton.backends import Backend, Backends
from gateway.triton.client import Client, EntryState
from gateway.triton.errors import MESSAGE_LIMIT, Fault, TritonError
from gateway.triton.options import PoolOptions
from gateway.triton.replicas import Replica, ReplicaState, unable

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_ANSWERS_WITHIN_S = 15.0
"""From an engine's load to its first answered probe; the warm-up has generated a token already."""
_POLL_ANSWER_S = 0.5
UNLOADED_AGAIN = {EntryState.UNLOADING, EntryState.UNLOADED}
"""States of a model just loaded that somebody else has unloaded since."""
_DEAD_UNLOADS_WITHIN_S = 2.0
"""A dead instance holds no memory, but streams that ran on it keep it in state UNLOADING for ever."""

_LOAD_FAILURE = re.compile(r"is at UNAVAILABLE state: (?:Internal: )?(.*)", re.DOTALL)
_TRACEBACK = re.compile(r"\s+At:\n.*", re.DOTALL)
_DEAD_STUB = "is not healthy"

_LOAD_FAILED = {Fault.UNKNOWN, Fault.TENSORS_REFUSED}
"""Faults of a load that are about the model; the admin is told Triton's own words."""


class UnloadReason(enum.StrEnum):
    """Why a model is unloaded; the value is the label `reason` of `tritongate_model_unloads_total`."""

    ADMIN = "admin"
    """Somebody asked for it, also as the first half of a reload."""
    IDLE = "idle"
    """Nobody used it for long."""
    ROOM = "room"
    """Another model needs its place."""


class ModelControl:
    """Controls models, one change of each model at a time."""

    def __init__(self, backends: Backends, options: PoolOptions) -> None:
        self._backends = backends
        self._timeout_s = options.load_timeout_s
        self._metrics = options.metrics
        self._names = options.names
        self._changing: set[str] = set()

    async def load(self, model: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """Load `model` where it is not loaded; with `reload`, unload it first where it is.

        Tritons load at the same time, but reload one after the other, so that the others go on serving and a
        broken checkpoint takes down only one of them.

        `upstream` is the address of one Triton; None: all that have the model.

        Raises:
            GatewayError: the error of the first Triton that failed; the others may have been changed.
        """
        with self._exclusive(model):
            async with self._having(model, upstream) as backends:
                if reload:
                    return [await self._load_on(model, backend, reload=True) for backend in backends]
                return await _all(self._load_on(model, backend, reload=False) for backend in backends)

    async def unload(
        self, model: str, *, upstream: str | None, reason: UnloadReason = UnloadReason.ADMIN
    ) -> list[EntriesChanged]:
        """Unload `model` where it is loaded, after its requests in flight have ended.

        Raises:
            GatewayError: as for `load`.
        """
        with self._exclusive(model):
            async with self._having(model, upstream) as backends:
                return await _all(self._unload_on(model, backend, reason) for backend in backends)

    @contextlib.contextmanager
    def _exclusive(self, model: str) -> Iterator[None]:
        if model in self._changing:
            raise ConflictError(f"The model {model!r} is being loaded or unloaded already.")
        self._changing.add(model)
        try:
            yield
        finally:
            self._changing.discard(model)

    @contextlib.asynccontextmanager
    async def _having(self, model: str, upstream: str | None) -> AsyncIterator[list[Backend]]:
        """Yield the requested Tritons that have the model on disk.

        Raises:
            GatewayError: there is none; or, behind the block, one could not be asked, so it is as it was.
        """
        present = self._backends.present()
        if not present:
            raise unable([]).to_gateway()
        requested = [backend for backend in present if upstream in (None, backend.address)]
        if not requested:
            known = ", ".join(backend.address for backend in present)
            raise InvalidRequestError(f"There is no upstream {upstream!r}, only {known}.", param="upstream")
        found: list[Backend] = []
        unknown: GatewayError | None = None
        for backend in requested:
            try:
                with _as_gateway_errors(backend):
                    if model in await backend.client.repository():
                        found.append(backend)
            except GatewayError as error:
                unknown = unknown or error
        if not (found or unknown):
            raise ModelNotFoundError(f"No Triton has a model {model!r}.")
        if found:
            yield found
        if unknown is not None:
            raise unknown

    async def _load_on(self, model: str, backend: Backend, *, reload: bool) -> EntriesChanged:
        replica, client = backend.replicas.get(model), backend.client
        patience_s = self._patience_s(replica)
        serves_on = not reload and replica is not None and replica.state is ReplicaState.READY
        with _as_gateway_errors(backend):
            with _withdrawn(None if serves_on else replica, wanted=True):
                if reload and await self._unload_entry(model, client, patience_s):
                    self._unloaded(model, backend, UnloadReason.ADMIN)
                changed = await self._load_entry(model, backend)
            if replica is None:
                replica = await backend.examine(model)  # what has no known contract is not served
            await self._await_answer(model, replica, client)
        return _changed("loaded", model, backend, changed=changed)

    async def _await_answer(self, model: str, replica: Replica, client: Client) -> None:
        """Wait until a loaded model answers, as long as nobody unloads it again."""
        end = asyncio.get_running_loop().time() + _ANSWERS_WITHIN_S
        while not await replica.ready_within(_POLL_ANSWER_S):
            if (await client.repository()).get(model) in UNLOADED_AGAIN:
                raise UnavailableError(f"The model {model!r} was unloaded again.", reason="unloaded")
            if asyncio.get_running_loop().time() > end:
                raise UnavailableError(
                    f"The model {model!r} is loaded, but does not answer ({replica.reason}); "
                    "it may have to be reloaded.",
                    reason="not_ready",
                )

    async def _unload_on(self, model: str, backend: Backend, reason: UnloadReason) -> EntriesChanged:
        replica = backend.replicas.get(model)
        patience_s = self._patience_s(replica)
        with _as_gateway_errors(backend), _withdrawn(replica, wanted=False):
            changed = await self._unload_entry(model, backend.client, patience_s)
        if changed:
            self._unloaded(model, backend, reason)
        return _changed("unloaded", model, backend, changed=changed)

    def _unloaded(self, model: str, backend: Backend, reason: UnloadReason) -> None:
        for name in self._names(model):
            self._metrics.model_unloads.labels(name, backend.address, reason).inc()

    async def _load_entry(self, model: str, backend: Backend) -> bool:
        """Load the model unless it is loaded; return whether it had to be."""
        client, clock = backend.client, asyncio.get_running_loop().time
        state = await _state(model, client)
        if state is EntryState.READY:
            return False
        if state is EntryState.UNLOADING:
            await self._await_gone(model, client, self._timeout_s)
        began, failed = clock(), True
        try:
            await client.load(model, timeout_s=self._timeout_s)
            failed = False
        except TritonError as error:
            raise self._not_loaded(model, error) from error
        finally:
            for name in self._names(model):
                self._metrics.model_loaded(name, backend.address, clock() - began, failed=failed)
        return True

    async def _unload_entry(self, model: str, client: Client, patience_s: float) -> bool:
        """Unload the model if it is loaded; return whether it was."""
        if not (await _state(model, client)).in_memory:
            return False
        await client.unload(model)
        await self._await_gone(model, client, patience_s)
        return True

    def _patience_s(self, replica: Replica | None) -> float:
        """Return how long an unload may take."""
        dead = replica is not None and replica.state is ReplicaState.STUCK
        return min(_DEAD_UNLOADS_WITHIN_S, self._timeout_s) if dead else self._timeout_s

    async def _await_gone(self, model: str, client: Client, patience_s: float) -> None:
        end = asyncio.get_running_loop().time() + patience_s
        while (await client.repository()).get(model, EntryState.NEVER_LOADED).in_memory:
            if asyncio.get_running_loop().time() > end:
                if patience_s < self._timeout_s:
                    return  # a dead instance: nothing of it is in memory
                raise DeadlineError(
                    f"{model} was not gone after {patience_s:g} s: requests in flight hold it until they end."
                    " If none are left, restart that Triton."
                )
            await asyncio.sleep(_POLL_S)

    def _not_loaded(self, model: str, error: TritonError) -> GatewayError:
        if error.fault in _LOAD_FAILED:
            return UpstreamProtocolError(f"{model} could not be loaded: {load_failure(error.detail)}")
        if error.fault is Fault.DEADLINE:
            return DeadlineError(
                f"{model} was not loaded after {self._timeout_s:g} s; Triton is still at it."
            )
        return error.to_gateway()


async def _state(model: str, client: Client) -> EntryState:
    """Return the state of the model's entry on this Triton.

    Raises:
        ConflictError: somebody else is loading it.
    """
    state = (await client.repository()).get(model, EntryState.NEVER_LOADED)
    if state is EntryState.LOADING:
        raise ConflictError(f"{model} is being loaded already.")
    return state


@contextlib.contextmanager
def _as_gateway_errors(backend: Backend) -> Iterator[None]:
    """Turn errors into the gateway's own, with the name of this Triton in the message."""
    try:
        yield
    except (TritonError, GatewayError) as error:
        own = error.to_gateway() if isinstance(error, TritonError) else error
        raise type(own)(
            f"{backend.address}: {own.message}",
            param=own.param,
            retry_after_s=own.retry_after_s,
            reason=own.reason,
        ) from error


def _withdrawn(replica: Replica | None, *, wanted: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if replica is None else replica.withdrawn(wanted=wanted)


def _changed(what: str, model: str, backend: Backend, *, changed: bool) -> EntriesChanged:
    entries = (model,) if changed else ()
    extra = {"model": model, "upstream": backend.address, "entries": list(entries)}
    _log.info("model %s", what, extra=extra)
    return EntriesChanged(upstream=backend.address, entries=entries)


def load_failure(detail: str) -> str:
    """Return why Triton could not load an entry, as one line without traceback; it may contain a path."""
    found = _LOAD_FAILURE.search(detail)
    reason = _TRACEBACK.sub("", found[1] if found else detail)
    if _DEAD_STUB in reason:
        return "its process died while loading; is there enough memory?"
    return " ".join(reason.split()).rstrip(";")[:MESSAGE_LIMIT]


async def _all(changes: Iterable[Coroutine[Any, Any, EntriesChanged]]) -> list[EntriesChanged]:
    """Await all of them, then raise the first failure if there was one."""
    done = await asyncio.gather(*changes, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]
