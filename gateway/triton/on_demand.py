"""Loads models that requests ask for, and unloads others to make room.

A request for a model that no Triton has loaded waits, in line with those for other such models. One task
looks at the Tritons' repositories again and again, and decides what is next:

    wanted ──there is room──▶ loading ──ready──▶ its requests go on
       └──no room──▶ others are unloaded: the idle ones that were used least recently; if all are in use,
                     the one loaded first gets no new requests until those that run have ended

Room is a number of models, or the memory that they are said to take, or both.

Triton's own repository index is what is true, for several processes and gateways too: each reads it before
every decision. Processes of one machine begin loads one after the other, by a lock. Gateways on several
machines may decide at the same moment; if more is loaded than is allowed, the next look unloads it. A model
just loaded stays for `min_loaded_s`, so that gateways which take turns serve requests between the changes.

Knows nothing of HTTP, and of requests only for which model they wait, and until when.
"""

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import random
import tempfile
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.errors import ConflictError, GatewayError, UnavailableError
from gateway.triton.admin import UNLOADED_AGAIN, ModelControl, UnloadReason
from gateway.triton.affinity import rank
from gateway.triton.backends import Backend, Backends
from gateway.triton.client import EntryState
from gateway.triton.errors import Fault, TritonError
from gateway.triton.options import OnDemandPolicy
from gateway.triton.replicas import ReplicaState, unable

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_LOOK_EVERY_S = 1.0
_LOOK_EVERY_WHILE_WAITING_S = 0.2
LEFT_S = 0.5
"""What must be left of a request's time: an answer that says why comes before one that only says too late."""
_READ_WITHIN_S = 1.0
"""How long a look waits for a repository that was read before: a Triton that hangs must not delay others."""
_ANSWERS_WITHIN_S = 15.0
"""From when Triton calls a model ready to its first answered probe."""
_FAILED_FOR_S = 10.0
"""So long after a failed load nobody's request starts another one."""
_SEEN_EVERY_S = 0.02
_CLAIM_S = (0.05, 0.3)
"""Room that somebody else made must be seen for so long, drawn anew each time: they take it at once."""


class _Wish:
    """A model that requests wait for."""

    def __init__(self) -> None:
        self.waiting = 0
        self.over = asyncio.Event()
        self.error: GatewayError | None = None
        """Why it is not loaded; None after `over`: it may take requests."""
        self.reason = "its turn has not come"
        self.moved = False
        """Whether a Triton went while it loaded the model: one more is tried, lest all go with it."""


@dataclass(eq=False, slots=True)
class _Place:
    """One Triton: what is known of its models, by name; times are the event loop's."""

    backend: Backend
    states: Mapping[str, EntryState] = field(default_factory=dict)
    """The served models on its disk, at the latest look; none if it did not answer."""
    known: bool = False
    """Whether it was ever read, or failed to be."""
    reading: asyncio.Task[None] | None = None
    """Still reads them, though the look is over: until it has, nothing is begun here."""
    ready_since: dict[str, float] = field(default_factory=dict)
    used_at: dict[str, float] = field(default_factory=dict)
    loading: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    unloading: set[str] = field(default_factory=set)
    planned: set[str] = field(default_factory=set)
    """The models that will take room, as far as one look has decided."""
    made_for: set[str] = field(default_factory=set)
    """Models for which this process has made room."""
    room_from: dict[str, float] = field(default_factory=dict)
    """When the room that there is for a model may be used, whoever made it."""

    def held(self) -> set[str]:
        """Return the models that take room."""
        return self.loading.keys() | {model for model, state in self.states.items() if state.in_memory}


class OnDemand:
    """Loads the models of `backends`, and unloads them, by `control`. Call `start` inside the event loop."""

    def __init__(self, backends: Backends, control: ModelControl, policy: OnDemandPolicy) -> None:
        self._backends = backends
        self._control = control
        self._policy = policy
        self._places: dict[Backend, _Place] = {}
        self._wishes: dict[str, _Wish] = {}
        """By model, in the order in which they were made."""
        self._failed: dict[str, tuple[float, UnavailableError]] = {}
        """Models that could not be loaded: until when that is not tried again, and the error meanwhile."""
        self._wake = asyncio.Event()
        self._changes: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._watch = asyncio.create_task(self._look_for_ever(), name="load models on demand")

    async def close(self) -> None:
        """Stop; Triton finishes what was begun. Requests that wait fail with `Fault.CLOSED`."""
        tasks = [*self._changes, *([] if self._watch is None else [self._watch])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in list(self._wishes):
            self._end(model, TritonError(Fault.CLOSED, "the pool was closed").to_gateway())

    async def loading(self, model: str, deadline: float) -> AsyncGenerator[None, None]:
        """Yield about every second until a replica takes requests; end at once if one does.

        Raises:
            UnavailableError: it cannot be loaded, or not in time; the message says why.
        """
        clock = asyncio.get_running_loop().time
        while not self._takes_requests(model):
            wish = self._wishes.get(model)
            if wish is None:
                if (failed := self._failed.get(model)) and clock() < failed[0]:
                    raise failed[1]
                wish = self._wishes[model] = _Wish()
                self._wake.set()
            wish.waiting += 1
            try:
                while not wish.over.is_set():
                    left_s = deadline - LEFT_S - clock()
                    if left_s <= 0:
                        raise self._too_late(model, wish)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left_s, _HEARTBEAT_S)):
                            await wish.over.wait()
                    if not wish.over.is_set():
                        yield
            finally:
                wish.waiting -= 1
                if not wish.waiting and self._wishes.get(model) is wish:
                    del self._wishes[model]
            if wish.error is not None:
                raise wish.error
        self._use(model)

    def _too_late(self, model: str, wish: _Wish) -> UnavailableError:
        return UnavailableError(
            f"The model {model!r} was not loaded in time: {wish.reason}.",
            retry_after_s=max(1, math.ceil(self._policy.min_loaded_s)),
            reason=Fault.NOT_READY.code,
        )

    def _takes_requests(self, model: str) -> bool:
        return any(
            replica.state is ReplicaState.READY and not replica.yielding
            for replica in self._backends.replicas(model)
        )

    def _use(self, model: str) -> None:
        now = asyncio.get_running_loop().time()
        for place in self._places.values():
            place.used_at[model] = now

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:  # noqa: BLE001 - without this task, nothing would ever be loaded again
                _log.exception("looking after the loaded models failed")
            # Never in step with other processes.
            pause_s = _LOOK_EVERY_WHILE_WAITING_S if self._wishes else _LOOK_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * random.uniform(0.5, 1.5)):  # noqa: S311
                    await self._wake.wait()
            self._wake.clear()

    async def _look(self) -> None:
        """Read the repositories, then decide without a pause, so that no request comes in between."""
        self._places = {
            backend: self._places.get(backend) or _Place(backend) for backend in self._backends.present()
        }
        places = list(self._places.values())
        await self._read_all(places)
        for place in places:
            self._note(place)
            if place.reading is None:  # before wishes: what goes is not to get those that wait for it
                self._unload_needless(place)
        for model, wish in list(self._wishes.items()):
            self._grant(model, wish)

    async def _read_all(self, places: list[_Place]) -> None:
        """Read repositories; one that does not answer soon is waited for by later looks."""
        reads = {place: place.reading or self._begin(self._read(place)) for place in places}
        if reads:
            known = all(place.known for place in places)
            await asyncio.wait(reads.values(), timeout=_READ_WITHIN_S if known else None)
        for place, read in reads.items():
            place.reading = None if read.done() else read

    async def _read(self, place: _Place) -> None:
        try:
            states = await place.backend.client.repository()
        except TritonError:
            states = {}
        models = self._backends.models()
        place.states = {model: state for model, state in states.items() if model in models}
        place.known = True

    def _note(self, place: _Place) -> None:
        """Note what is new about the models of one Triton."""
        now = asyncio.get_running_loop().time()
        ready = [model for model, state in place.states.items() if state is EntryState.READY]
        place.ready_since = {model: place.ready_since.get(model, now) for model in ready}
        for model in ready:
            if (replica := place.backend.replicas.get(model)) is not None and replica.outstanding:
                place.used_at[model] = now
        for model, replica in place.backend.replicas.items():
            replica.yielding = model in place.unloading
        held = place.held()
        leaving = {model for model, state in place.states.items() if state is EntryState.UNLOADING}
        place.planned = held - place.unloading - leaving  # whoever unloads them
        roomy = {model for model in place.states.keys() - held if self._fits(place, model)}
        place.made_for &= roomy
        place.room_from = {
            model: place.room_from.get(model, now + random.uniform(*_CLAIM_S))  # noqa: S311
            for model in roomy
        }

    def _fits(self, place: _Place, model: str) -> bool:
        return self._policy.allows(place.held() | {model})

    def _grant(self, model: str, wish: _Wish) -> None:
        """Do what is next for a model that requests wait for."""
        places = [place for place in self._places.values() if model in place.states]
        if self._takes_requests(model):
            self._end(model, None)
        elif any(
            model in place.loading or place.states.get(model) is EntryState.LOADING
            for place in self._places.values()
        ):
            wish.reason = "it is being loaded"
        elif not places:
            self._end(model, unable(self._backends.replicas(model)).to_gateway())
        elif soon := [place for place in places if self._may_answer(model, place)]:
            wish.reason = "it is loaded, but does not answer yet"
            for place in soon:
                replica = place.backend.replicas.get(model)
                if replica is not None:  # else its contract is being read
                    replica.look_now()
        elif free := [place for place in places if not place.states[model].in_memory]:
            self._give_room(model, [place for place in free if place.reading is None], wish)
        elif any(self._is_loaded(model, place) for place in places):
            self._end(model, unable(self._backends.replicas(model)).to_gateway())

    def _is_loaded(self, model: str, place: _Place) -> bool:
        return place.states[model] is EntryState.READY and not self._leaves(place, model)

    def _may_answer(self, model: str, place: _Place) -> bool:
        """Whether Triton calls a model ready, and its replica may soon take requests."""
        replica = place.backend.replicas.get(model)
        now = asyncio.get_running_loop().time()
        return (
            self._is_loaded(model, place)
            and (replica is None or replica.state is not ReplicaState.STUCK)
            and now <= place.ready_since.get(model, now) + _ANSWERS_WITHIN_S
        )

    def _give_room(self, model: str, places: list[_Place], wish: _Wish) -> None:
        """Load a model on one of `places`, or make room there."""
        # All gateways prefer the same Triton, as long as that has room.
        places.sort(
            key=lambda place: (not self._fits(place, model), rank(model.encode(), place.backend.address))
        )
        now = asyncio.get_running_loop().time()
        for place in places:
            planned = place.planned | {model}
            if self._policy.allows(planned):  # perhaps once others are gone
                if self._fits(place, model) and self._is_ours(place, model, now):
                    place.made_for.discard(model)
                    place.loading[model] = self._begin(self._load(place, model))
                    wish.reason = "it is being loaded"
                place.planned = planned
                return
            wish.reason = "models in use take all the room"
            if leaving := self._leaving(place, planned):
                for each in leaving:
                    self._make_leave(place, each, heir=model)
                place.planned = planned.difference(leaving)
                return

    def _is_ours(self, place: _Place, model: str, now: float) -> bool:
        """Whether the room for a model is for this process to use."""
        limited = self._policy.max_loaded is not None or self._policy.max_loaded_gib is not None
        return not limited or model in place.made_for or now >= place.room_from.get(model, now)

    def _leaving(self, place: _Place, planned: Collection[str], *, at_once: bool = False) -> list[str]:
        """Return the loaded models that must go so that the others of `planned` may be loaded.

        The idle ones come first, of which the one used least recently; none: not enough may go. `at_once`:
        also what has not had its time may go, and what is not enough.
        """
        now = asyncio.get_running_loop().time()
        enough_s = 0.0 if at_once else self._policy.min_loaded_s
        found = [
            model
            for model, since in place.ready_since.items()
            if now - since >= enough_s and not self._kept(place, model)
        ]
        idle = sorted(
            (model for model in found if self._idle(place, model)), key=lambda each: self._used(place, each)
        )
        used = sorted(set(found).difference(idle), key=lambda each: place.ready_since[each])
        leaving: list[str] = []
        for model in (*idle, *used):
            leaving.append(model)
            if self._allows_without(planned, leaving):
                break
        else:
            return leaving if at_once else []
        for model in leaving[-2::-1]:  # a later one may have made enough room by itself
            if self._allows_without(planned, rest := [each for each in leaving if each != model]):
                leaving = rest
        return leaving

    def _allows_without(self, planned: Collection[str], leaving: Collection[str]) -> bool:
        return self._policy.allows(set(planned).difference(leaving))

    def _make_leave(
        self, place: _Place, model: str, reason: UnloadReason = UnloadReason.ROOM, heir: str | None = None
    ) -> None:
        """Unload a model, perhaps for `heir`; one in use gets no new requests until those have ended."""
        replica = place.backend.replicas.get(model)
        place.planned.discard(model)
        if replica is not None:
            replica.yielding = True
        if replica is None or not replica.outstanding:  # Triton lets end what other gateways have there.
            place.unloading.add(model)
            self._begin(self._unload_on(place, model, reason, heir))

    def _kept(self, place: _Place, model: str) -> bool:
        """Tell whether a model cannot be unloaded to make room, or is made to already."""
        return model in self._policy.pinned or model in place.loading or self._leaves(place, model)

    def _leaves(self, place: _Place, model: str) -> bool:
        """Tell whether a model is being unloaded, or will be once its running requests have ended."""
        replica = place.backend.replicas.get(model)  # a loaded one without a known contract has none
        return model in place.unloading or (replica is not None and replica.yielding)

    def _idle(self, place: _Place, model: str) -> bool:
        replica = place.backend.replicas.get(model)
        return replica is None or not (replica.outstanding or replica.in_use_elsewhere)

    def _used(self, place: _Place, model: str) -> float:
        replica, since = place.backend.replicas.get(model), place.ready_since[model]
        elsewhere = since if replica is None else replica.used_elsewhere_at
        return max(since, place.used_at.get(model, since), elsewhere)

    def _unload_needless(self, place: _Place) -> None:
        """Unload what nobody uses for long, and what is one too many."""
        now = asyncio.get_running_loop().time()
        limit = self._policy.unload_idle_s
        for model in place.ready_since if limit is not None else ():
            unused = self._idle(place, model) and now - self._used(place, model) >= (limit or 0)
            if unused and model not in self._wishes and not self._kept(place, model):
                self._make_leave(place, model, UnloadReason.IDLE)
        # One at a time and by chance, since other gateways see the same.
        staying = place.planned
        leaving = [] if self._policy.allows(staying) else self._leaving(place, staying, at_once=True)
        for model in leaving[:1]:
            replica = place.backend.replicas.get(model)
            if (replica is not None and replica.outstanding) or random.choice((True, False)):  # noqa: S311
                self._make_leave(place, model)

    def _begin(self, change: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    async def _load(self, place: _Place, model: str) -> None:
        """Load a model if there still is room."""
        address = place.backend.address
        load: asyncio.Task[object] | None = None
        try:
            with _alone(address) as alone:
                await self._read(place)
                # The model itself is among what takes room.
                if not alone or model not in place.states or not self._fits(place, model):
                    return
                load = asyncio.create_task(self._control.load(model, reload=False, upstream=address))
                # Until others can see it.
                while not (load.done() or place.states.get(model, EntryState.NEVER_LOADED).in_memory):
                    await asyncio.wait({load}, timeout=_SEEN_EVERY_S)
                    await self._read(place)
            await load
        except ConflictError:
            pass  # somebody else is at it
        except GatewayError as error:
            await self._load_failed(place, model, error)
        finally:
            if load is not None:
                load.cancel()
            del place.loading[model]
            self._wake.set()

    async def _load_failed(self, place: _Place, model: str, error: GatewayError) -> None:
        """End the wish with `error`, unless others took the room or unloaded it, or the Triton went."""
        extra = {"model": model, "upstream": place.backend.address, "detail": error.message}
        _log.warning("model not loaded on demand", extra=extra)
        await self._read(place)
        crowded = not self._fits(place, model)
        if crowded or (isinstance(error, UnavailableError) and place.states.get(model) in UNLOADED_AGAIN):
            return
        sent = UnavailableError(
            f"The model {model!r} could not be loaded; the gateway's log says why.",
            retry_after_s=math.ceil(_FAILED_FOR_S),
            reason=Fault.NOT_READY.code,
        )
        self._failed[model] = asyncio.get_running_loop().time() + _FAILED_FOR_S, sent
        wish = self._wishes.get(model)
        if wish is not None and not wish.moved and model not in place.states:
            wish.moved = True
        else:
            self._end(model, sent)

    async def _unload_on(self, place: _Place, model: str, reason: UnloadReason, heir: str | None) -> None:
        try:
            await self._control.unload(model, upstream=place.backend.address, reason=reason)
            if heir is not None:
                place.made_for.add(heir)
        except GatewayError as error:
            extra = {"model": model, "upstream": place.backend.address, "detail": error.message}
            _log.warning("model not unloaded", extra=extra)
        finally:
            place.unloading.discard(model)
            self._wake.set()

    def _end(self, model: str, error: GatewayError | None) -> None:
        """Let those that wait for `model` go on, or fail with `error`."""
        if (wish := self._wishes.pop(model, None)) is None:
            return
        if error is None:
            self._failed.pop(model, None)
        wish.error = error
        wish.over.set()


@contextlib.contextmanager
def _alone(address: str) -> Iterator[bool]:
    """Keep this user's other processes from beginning a load on the same Triton; False: one of them does."""
    name = f"tritongate-{os.getuid()}-{rank(b'', address).hex()}.lock"
    try:
        path = Path(tempfile.gettempdir()) / name  # there may be no such folder
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield True  # the index alone must do
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = os.fstat(file).st_nlink > 0  # else its last holder has removed it since it was opened
    except OSError as error:
        alone = not isinstance(error, BlockingIOError)  # there may be no locks here
    try:
        yield alone
    finally:
        if alone:
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(file)
