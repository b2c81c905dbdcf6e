"""The current Tritons of the pool: those configured by address, and those found behind names.

A backend is one address, with its own health and one client, however many names lead to it.

    present ──its last name lost it──▶ leaving ──nothing runs there any more──▶ gone
       ▲                                  │
       └────────────found again───────────┘

Only present backends get new requests. Knows nothing of which models there should be.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from gateway.triton.backoff import Backoff
from gateway.triton.client import Client
from gateway.triton.errors import Fault
from gateway.triton.replicas import HealthPolicy, Replica, ReplicaState, UpstreamObserver
from gateway.triton.resolver import Name, NameWatch, Outcome, Resolve, name_in

_log = logging.getLogger(__name__)

_FORGET_AFTER_S = 60.0
"""How long a backend's error counters outlive it, so that Prometheus reads the last errors."""


class PoolObserver(UpstreamObserver, Protocol):
    """Told of backends, for metrics. Called on the event loop; must not block."""

    def upstream_left(self, upstream: str) -> None:
        """`upstream` takes no new requests and has no health metrics any more; it may come back."""
        ...

    def upstream_forgotten(self, upstream: str) -> None:
        """Nothing more will be reported of `upstream`, unless it comes back."""
        ...

    def upstream_lookup(self, upstream: str, outcome: str) -> None:
        """A name was looked up; `outcome` is a value of `gateway.triton.resolver.Outcome`."""
        ...


class BackendState(enum.StrEnum):
    """The state of a backend."""

    PRESENT = "present"
    LEAVING = "leaving"
    """Its running requests finish; it gets no new ones."""
    GONE = "gone"


class Backend:
    """One Triton: its client, the replicas of its models, and the tasks that watch them.

    Args:
        client: of the Triton; closed with the backend.
        policy: how health is watched.
        idle_timeout_s: for the delta channels.
        observer: told of its replicas' health while it is present.
        changed: called when a replica became unable to take requests.
    """

    def __init__(
        self,
        client: Client,
        policy: HealthPolicy,
        *,
        idle_timeout_s: float,
        observer: UpstreamObserver | None,
        changed: Callable[["Backend"], None],
    ) -> None:
        self.client = client
        self.state = BackendState.PRESENT
        self.replicas: dict[str, Replica] = {}
        """By model."""
        self.listed = False
        """Whether its repository was read."""
        self._policy = policy
        self._idle_timeout_s = idle_timeout_s
        self._observer = observer
        self._changed = changed
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Whether any model on it takes requests."""
        return any(replica.state is ReplicaState.READY for replica in self.replicas.values())

    def add(self, model: str) -> Replica:
        """Start watching a model on it."""
        replica = Replica(model, self.client, self._policy, self, idle_timeout_s=self._idle_timeout_s)
        self.replicas[model] = replica
        self.spawn(replica.watch(), f"watch {model} on {self.client.address}")
        return replica

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` until the backend is closed."""
        self._tasks.append(asyncio.create_task(work, name=name))

    def become(self, state: BackendState) -> None:
        """Enter `state`; when it comes back, report its health again."""
        self.state = state
        for replica in self.replicas.values():
            healthy = replica.state is ReplicaState.READY
            self.upstream_health(replica.model, replica.upstream, healthy=healthy)

    async def idle(self) -> None:
        """Wait until no request runs on it."""
        while busy := [replica for replica in self.replicas.values() if replica.outstanding]:
            await busy[0].idle()

    async def close(self, fault: Fault, detail: str) -> None:
        """Stop watching, and end its running requests with `fault`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas.values():
            await replica.close()
        await self.client.close(fault, detail)

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        """Pass on a replica's health, unless this backend is leaving."""
        if self.state is not BackendState.PRESENT:
            return
        if self._observer is not None:
            self._observer.upstream_health(model, upstream, healthy=healthy)
        if not healthy:
            self._changed(self)

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        """Pass on a failed generation."""
        if self._observer is not None:
            self._observer.upstream_error(model, upstream, code)


class Backends:
    """All backends. Call `start` inside the event loop.

    Args:
        upstreams: addresses `host:port`, and names `dns:///host:port`.
        make: returns a new backend for an address, with its models.
        policy: has the pauses between lookups of a name while none of its Tritons serves.
        interval_s: seconds between two lookups of a name otherwise.
        resolve: looks up a name.
        observer: told of backends that come and go.
    """

    def __init__(
        self,
        upstreams: Sequence[str],
        *,
        make: Callable[[str], Backend],
        policy: HealthPolicy,
        interval_s: float,
        resolve: Resolve,
        observer: PoolObserver | None,
    ) -> None:
        self._fixed = [upstream for upstream in upstreams if name_in(upstream) is None]
        self._watches = [
            NameWatch(
                name,
                self,
                interval_s=interval_s,
                backoff=Backoff(policy.backoff_first_s, policy.backoff_limit_s),
                resolve=resolve,
            )
            for name in map(name_in, dict.fromkeys(upstreams))
            if name is not None
        ]
        self._make = make
        self._observer = observer
        self._led_to: dict[Name, Sequence[str]] = {}
        """The last known addresses of each name."""
        self._backends: dict[str, Backend] = {}
        """Present and leaving ones by address."""
        self._looking: list[asyncio.Task[None]] = []
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Tasks that wait for leaving backends to become idle, by address."""
        self._seeing_off: set[asyncio.Task[None]] = set()
        """The same tasks, and those that close backends that are gone."""

    def start(self) -> None:
        """Add the configured addresses, and start looking up the names."""
        self._settle()
        self._looking += [asyncio.create_task(watch.watch()) for watch in self._watches]

    async def close(self) -> None:
        """Close all backends; their running requests end with `Fault.CLOSED`."""
        for task in (*self._looking, *self._leaving.values()):
            task.cancel()
        await asyncio.gather(*self._looking, *self._seeing_off, return_exceptions=True)
        for backend in self._backends.values():
            await backend.close(Fault.CLOSED, "the pool was closed")

    def present(self) -> list[Backend]:
        """Return the backends that may get new requests."""
        return [backend for backend in self._backends.values() if backend.state is BackendState.PRESENT]

    def of(self, client: Client) -> Backend | None:
        """Return the backend, present or leaving, that `client` belongs to."""
        backend = self._backends.get(client.address)
        return backend if backend is not None and backend.client is client else None

    def lost_health(self, backend: Backend) -> None:
        """Look up the names of `backend` again, if none of their Tritons serves."""
        for watch in self._watches:
            if backend.client.address in self._led_to.get(watch.name, ()):
                watch.look_soon()

    def serves(self, name: Name) -> bool:
        """See `Lookups.serves`."""
        return any(self._is_ready(address) for address in self._led_to.get(name, ()))

    def looked_up(self, name: Name, outcome: Outcome, addresses: Sequence[str]) -> None:
        """See `Lookups.looked_up`."""
        if self._observer is not None:
            self._observer.upstream_lookup(name.upstream, outcome)
        if outcome is Outcome.FAILED:
            return
        if outcome is Outcome.NONE:
            # The resolver may have lost its data: a backend that serves exists, whatever the resolver says.
            addresses = [address for address in self._led_to.get(name, ()) if self._is_ready(address)]
        self._led_to[name] = addresses
        self._settle()

    def _is_ready(self, address: str) -> bool:
        backend = self._backends.get(address)
        return backend is not None and backend.ready

    def _settle(self) -> None:
        """Make the named addresses, and no others, the backends."""
        wanted = dict.fromkeys([*self._fixed, *(each for led in self._led_to.values() for each in led)])
        for address in wanted:
            backend = self._backends.get(address)
            if backend is None:
                self._backends[address] = self._make(address)
                self._say("appeared", address)
            elif backend.state is BackendState.LEAVING:
                self._leaving.pop(address).cancel()
                backend.become(BackendState.PRESENT)
                self._say("came back", address)
        for backend in self.present():
            if backend.client.address not in wanted:
                self._lose(backend)

    def _lose(self, backend: Backend) -> None:
        address = backend.client.address
        backend.become(BackendState.LEAVING)
        if self._observer is not None:
            self._observer.upstream_left(address)
        self._say("left", address)
        task = asyncio.create_task(self._see_off(backend), name=f"see off {address}")
        self._leaving[address] = task
        self._seeing_off.add(task)
        task.add_done_callback(self._seeing_off.discard)

    async def _see_off(self, backend: Backend) -> None:
        address = backend.client.address
        await backend.idle()
        # From here on it cannot come back: the same address would be a new backend.
        backend.become(BackendState.GONE)
        del self._backends[address], self._leaving[address]
        await backend.close(Fault.UNREACHABLE, "no name leads to this address any more")
        asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._forget, address)

    def _forget(self, address: str) -> None:
        if address not in self._backends and self._observer is not None:
            self._observer.upstream_forgotten(address)

    def _say(self, what: str, address: str) -> None:
        if address not in self._fixed:
            _log.info("upstream %s", what, extra={"upstream": address})
