"""The current Tritons of the pool: those configured by address, and those found behind names.

A member is one address, with its own health and one channel, however many names lead to it.

    present ──its last name lost it──▶ leaving ──nothing runs there any more──▶ gone
       ▲                                  │
       └────────────found again───────────┘

Only present members get new requests. Knows nothing of which models there should be.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from gateway.triton.backoff import Backoff
from gateway.triton.channel import Channel
from gateway.triton.health import HealthPolicy, ReplicaState, UpstreamObserver
from gateway.triton.replicas import Replica
from gateway.triton.resolver import Name, NameWatch, Outcome, Resolve, name_in
from gateway.triton.status import Fault

_log = logging.getLogger(__name__)

_FORGET_AFTER_S = 60.0
"""How long a member's error counters outlive it, so that Prometheus reads the last errors."""


class PoolObserver(UpstreamObserver, Protocol):
    """Told of members, for metrics. Called on the event loop; must not block."""

    def upstream_left(self, upstream: str) -> None:
        """`upstream` takes no new requests and has no health metrics any more; it may come back."""
        ...

    def upstream_forgotten(self, upstream: str) -> None:
        """Nothing more will be reported of `upstream`, unless it comes back."""
        ...

    def upstream_lookup(self, upstream: str, outcome: str) -> None:
        """A name was looked up; `outcome` is a value of `gateway.triton.resolver.Outcome`."""
        ...


class MemberState(enum.StrEnum):
    """The state of a member."""

    PRESENT = "present"
    LEAVING = "leaving"
    """Its running requests finish; it gets no new ones."""
    GONE = "gone"


class Member:
    """One Triton: its channel, the replicas of its models, and the tasks that watch them.

    Args:
        channel: to the Triton; closed with the member.
        policy: how health is watched.
        idle_timeout_s: for the delta channels.
        observer: told of its replicas' health while it is present.
        changed: called when a replica became unable to take requests.
    """

    def __init__(
        self,
        channel: Channel,
        policy: HealthPolicy,
        *,
        idle_timeout_s: float,
        observer: UpstreamObserver | None,
        changed: Callable[["Member"], None],
    ) -> None:
        self.channel = channel
        self.state = MemberState.PRESENT
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
        replica = Replica(model, self.channel, self._policy, self, idle_timeout_s=self._idle_timeout_s)
        self.replicas[model] = replica
        self.spawn(replica.watch(), f"watch {model} on {self.channel.address}")
        return replica

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` until the member is closed."""
        self._tasks.append(asyncio.create_task(work, name=name))

    def become(self, state: MemberState) -> None:
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
        await self.channel.close(fault, detail)

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        """Pass on a replica's health, unless this member is leaving."""
        if self.state is not MemberState.PRESENT:
            return
        if self._observer is not None:
            self._observer.upstream_health(model, upstream, healthy=healthy)
        if not healthy:
            self._changed(self)

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        """Pass on a failed generation."""
        if self._observer is not None:
            self._observer.upstream_error(model, upstream, code)


class Members:
    """All members. Call `start` inside the event loop.

    Args:
        upstreams: addresses `host:port`, and names `dns:///host:port`.
        make: returns a new member for an address, with its models.
        policy: has the pauses between lookups of a name while none of its Tritons serves.
        interval_s: seconds between two lookups of a name otherwise.
        resolve: looks up a name.
        observer: told of members that come and go.
    """

    def __init__(
        self,
        upstreams: Sequence[str],
        *,
        make: Callable[[str], Member],
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
        self._members: dict[str, Member] = {}
        """Present and leaving ones by address."""
        self._looking: list[asyncio.Task[None]] = []
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Tasks that wait for leaving members to become idle, by address."""
        self._seeing_off: set[asyncio.Task[None]] = set()
        """The same tasks, and those that close members that are gone."""

    def start(self) -> None:
        """Add the configured addresses, and start looking up the names."""
        self._settle()
        self._looking += [asyncio.create_task(watch.watch()) for watch in self._watches]

    async def close(self) -> None:
        """Close all members; their running requests end with `Fault.CLOSED`."""
        for task in (*self._looking, *self._leaving.values()):
            task.cancel()
        await asyncio.gather(*self._looking, *self._seeing_off, return_exceptions=True)
        for member in self._members.values():
            await member.close(Fault.CLOSED, "the pool was closed")

    def present(self) -> list[Member]:
        """Return the members that may get new requests."""
        return [member for member in self._members.values() if member.state is MemberState.PRESENT]

    def of(self, channel: Channel) -> Member | None:
        """Return the member, present or leaving, that `channel` belongs to."""
        member = self._members.get(channel.address)
        return member if member is not None and member.channel is channel else None

    def lost_health(self, member: Member) -> None:
        """Look up the names of `member` again, if none of their Tritons serves."""
        for watch in self._watches:
            if member.channel.address in self._led_to.get(watch.name, ()):
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
            # The resolver may have lost its data: a member that serves exists, whatever the resolver says.
            addresses = [address for address in self._led_to.get(name, ()) if self._is_ready(address)]
        self._led_to[name] = addresses
        self._settle()

    def _is_ready(self, address: str) -> bool:
        member = self._members.get(address)
        return member is not None and member.ready

    def _settle(self) -> None:
        """Make the named addresses, and no others, the members."""
        wanted = dict.fromkeys([*self._fixed, *(each for led in self._led_to.values() for each in led)])
        for address in wanted:
            member = self._members.get(address)
            if member is None:
                self._members[address] = self._make(address)
                self._say("appeared", address)
            elif member.state is MemberState.LEAVING:
                self._leaving.pop(address).cancel()
                member.become(MemberState.PRESENT)
                self._say("came back", address)
        for member in self.present():
            if member.channel.address not in wanted:
                self._lose(member)

    def _lose(self, member: Member) -> None:
        address = member.channel.address
        member.become(MemberState.LEAVING)
        if self._observer is not None:
            self._observer.upstream_left(address)
        self._say("left", address)
        task = asyncio.create_task(self._see_off(member), name=f"see off {address}")
        self._leaving[address] = task
        self._seeing_off.add(task)
        task.add_done_callback(self._seeing_off.discard)

    async def _see_off(self, member: Member) -> None:
        address = member.channel.address
        await member.idle()
        # From here on it cannot come back: the same address would be a new member.
        member.become(MemberState.GONE)
        del self._members[address], self._leaving[address]
        await member.close(Fault.UNREACHABLE, "no name leads to this address any more")
        asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._forget, address)

    def _forget(self, address: str) -> None:
        if address not in self._members and self._observer is not None:
            self._observer.upstream_forgotten(address)

    def _say(self, what: str, address: str) -> None:
        if address not in self._fixed:
            _log.info("upstream %s", what, extra={"upstream": address})
