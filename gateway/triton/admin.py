"""Loads and unloads models on one or many Tritons.

A model is one entry. It is unloaded only after its requests in flight have ended. Loading a loaded entry
would put a second copy of its weights into memory, so a reload unloads first.

Knows nothing of HTTP or of permissions.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from gateway.dialects.registry import choose
from gateway.errors import (
    ConflictError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.triton.client import Client, Control, EntryState
from gateway.triton.errors import MESSAGE_LIMIT, Fault, TritonError
from gateway.triton.replicas import Replica, ReplicaState, unable
from gateway.upstream import EntriesChanged

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_ANSWERS_WITHIN_S = 15.0
"""From an engine's load to its first answered probe; the warm-up has generated a token already."""
_DEAD_UNLOADS_WITHIN_S = 2.0
"""A dead instance holds no memory, but streams that ran on it keep it in state UNLOADING for ever."""

_LOAD_FAILURE = re.compile(r"is at UNAVAILABLE state: (?:Internal: )?(.*)", re.DOTALL)
_TRACEBACK = re.compile(r"\s+At:\n.*", re.DOTALL)
_DEAD_STUB = "is not healthy"

_LOAD_FAILED = {Fault.INTERNAL, Fault.TENSORS_REFUSED}
"""Faults of a load that are about the model; the admin is told Triton's own words."""

ListClients = Callable[[], Sequence[Client]]
FindReplica = Callable[[str, Client], Replica | None]
AddReplica = Callable[[str, Client], Replica]


class ModelControl:
    """Controls models, one change of each model at a time.

    Args:
        clients: returns the clients to the current Tritons.
        find: returns the replica of a model on a Triton; None if it was never seen there.
        add: makes a replica, for a model that is served from now on.
        timeout_s: for loading a model, and for the requests in flight to end before it is unloaded.
    """

    def __init__(self, clients: ListClients, find: FindReplica, add: AddReplica, *, timeout_s: float) -> None:
        self._clients = clients
        self._find = find
        self._add = add
        self._timeout_s = timeout_s
        self._changing: set[str] = set()

    async def load(self, model: str, *, reload: bool, upstream: str | None) -> list[EntriesChanged]:
        """Load `model` where it is not loaded; with `reload`, unload it first where it is.

        Tritons load at the same time, but reload one after the other, so that the others go on serving and a
        broken checkpoint takes down only one of them.

        Args:
            model: its id.
            reload: whether to reload what is loaded.
            upstream: the address of one Triton; None: all that have the model.

        Raises:
            GatewayError: the error of the first Triton that failed; the others may have been changed.
        """
        with self._exclusive(model):
            clients = await self._having(model, upstream)
            if reload:
                return [await self._load_on(model, client, reload=True) for client in clients]
            return await _all(self._load_on(model, client, reload=False) for client in clients)

    async def unload(self, model: str, *, upstream: str | None) -> list[EntriesChanged]:
        """Unload `model` where it is loaded, after its requests in flight have ended.

        Args:
            model: its id.
            upstream: as for `load`.

        Raises:
            GatewayError: as for `load`.
        """
        with self._exclusive(model):
            clients = await self._having(model, upstream)
            return await _all(self._unload_on(model, client) for client in clients)

    @contextlib.contextmanager
    def _exclusive(self, model: str) -> Iterator[None]:
        if model in self._changing:
            raise ConflictError(f"The model {model!r} is being loaded or unloaded already.")
        self._changing.add(model)
        try:
            yield
        finally:
            self._changing.discard(model)

    async def _having(self, model: str, upstream: str | None) -> list[Client]:
        """Return the requested Tritons that have the model on disk."""
        clients = self._clients()
        if not clients:
            raise unable([]).to_gateway()
        requested = [client for client in clients if upstream in (None, client.address)]
        if not requested:
            known = ", ".join(client.address for client in clients)
            raise InvalidRequestError(f"There is no upstream {upstream!r}, only {known}.", param="upstream")
        found, unknown = [], None
        for client in requested:
            try:
                if model in await Control(client).repository():
                    found.append(client)
            except TritonError as error:
                unknown = error.to_gateway()
        if found:
            return found
        raise unknown or ModelNotFoundError(f"No Triton has a model {model!r}.")

    async def _load_on(self, model: str, client: Client, *, reload: bool) -> EntriesChanged:
        control = Control(client)
        replica = self._find(model, client)
        patience_s = self._patience_s(replica)
        serves_on = not reload and replica is not None and replica.state is ReplicaState.READY
        with _as_gateway_errors(client):
            with _withdrawn(None if serves_on else replica, wanted=True):
                if reload:
                    await self._unload_entry(model, control, patience_s)
                changed = await self._load_entry(model, control)
            if replica is None:
                replica = await self._serve(model, client, control)
        if not await replica.ready_within(_ANSWERS_WITHIN_S):
            raise UnavailableError(
                f"The model {model!r} is loaded on {client.address}, but does not answer "
                f"({replica.reason}); it may have to be reloaded."
            )
        return _changed("loaded", model, client, changed=changed)

    async def _unload_on(self, model: str, client: Client) -> EntriesChanged:
        replica = self._find(model, client)
        patience_s = self._patience_s(replica)
        with _as_gateway_errors(client), _withdrawn(replica, wanted=False):
            changed = await self._unload_entry(model, Control(client), patience_s)
        return _changed("unloaded", model, client, changed=changed)

    async def _load_entry(self, model: str, control: Control) -> bool:
        """Load the model unless it is loaded; return whether it had to be."""
        state = await _state(model, control)
        if state is EntryState.READY:
            return False
        if state is EntryState.UNLOADING:
            await self._await_gone(model, control, self._timeout_s)
        try:
            await control.load(model, timeout_s=self._timeout_s)
        except TritonError as error:
            raise self._not_loaded(model, error) from error
        return True

    async def _unload_entry(self, model: str, control: Control, patience_s: float) -> bool:
        """Unload the model if it is loaded; return whether it was."""
        if not (await _state(model, control)).in_memory:
            return False
        await control.unload(model)
        await self._await_gone(model, control, patience_s)
        return True

    def _patience_s(self, replica: Replica | None) -> float:
        """Return how long an unload may take."""
        dead = replica is not None and replica.state is ReplicaState.STUCK
        return min(_DEAD_UNLOADS_WITHIN_S, self._timeout_s) if dead else self._timeout_s

    async def _await_gone(self, model: str, control: Control, patience_s: float) -> None:
        end = asyncio.get_running_loop().time() + patience_s
        while (await control.repository()).get(model, EntryState.NEVER_LOADED).in_memory:
            if asyncio.get_running_loop().time() > end:
                if patience_s < self._timeout_s:
                    return  # a dead instance: nothing of it is in memory
                raise DeadlineError(
                    f"{model} was not gone after {patience_s:g} s: requests in flight hold it until they end."
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

    async def _serve(self, model: str, client: Client, control: Control) -> Replica:
        """Start serving a model that was unknown on this Triton, if its contract is known."""
        choose(model, await control.inputs(model))
        return self._find(model, client) or self._add(model, client)


async def _state(model: str, control: Control) -> EntryState:
    """Return the state of the model's entry on this Triton.

    Raises:
        ConflictError: somebody else is loading it.
    """
    state = (await control.repository()).get(model, EntryState.NEVER_LOADED)
    if state is EntryState.LOADING:
        raise ConflictError(f"{model} is being loaded already.")
    return state


@contextlib.contextmanager
def _as_gateway_errors(client: Client) -> Iterator[None]:
    """Turn errors into the gateway's own, with the name of this Triton in the message."""
    try:
        yield
    except (TritonError, GatewayError) as error:
        said = error.to_gateway() if isinstance(error, TritonError) else error
        words = f"{client.address}: {said.message}"
        raise type(said)(words, param=said.param, retry_after_s=said.retry_after_s) from error


def _withdrawn(replica: Replica | None, *, wanted: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if replica is None else replica.withdrawn(wanted=wanted)


def _changed(what: str, model: str, client: Client, *, changed: bool) -> EntriesChanged:
    entries = (model,) if changed else ()
    extra = {"model": model, "upstream": client.address, "entries": list(entries)}
    _log.info("model %s", what, extra=extra)
    return EntriesChanged(upstream=client.address, entries=entries)


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
