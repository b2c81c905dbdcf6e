"""The Tritons that the pool has at the moment: those named by address, and those that names lead to.

A member is one address. It is there once, however many names lead to it; what is known of its health, and its
one channel, are its own.

    present ──its last name lost it──▶ leaving ──nothing runs there any more──▶ gone
       ▲                                  │
       └────────────found again───────────┘

Only present ones are asked for anything new. Knows nothing of which models there should be.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from gateway.triton.backoff import Backoff
from gateway.triton.channel import Channel
from gateway.triton.delta_link import DeltaLink
from gateway.triton.replicas import HealthPolicy, Replica, ReplicaState, UpstreamObserver
from gateway.triton.resolver import Name, NameWatch, Outcome, Resolve, name_in
from gateway.triton.status import Fault

_log = logging.getLogger(__name__)

_FORGET_AFTER_S = 60.0
"""From a member's end to that of its error counters: Prometheus is to read the last errors once more."""


class PoolObserver(UpstreamObserver, Protocol):
    """What metrics want to hear of the members. Called on the event loop; must not block."""

    def upstream_left(self, upstream: str) -> None:
        """`upstream` takes no new requests and has no health any more; it may come back."""
        ...

    def upstream_forgotten(self, upstream: str) -> None:
        """Nothing will be told of `upstream`, unless it comes back."""
        ...

    def upstream_lookup(self, upstream: str, outcome: str) -> None:
        """A name was looked up; `outcome` is a value of `gateway.triton.resolver.Outcome`."""
        ...


class MemberState(enum.StrEnum):
    """Where a member is in its life."""

    PRESENT = "present"
    LEAVING = "leaving"
    """Its requests in progress end; none is added."""
    GONE = "gone"


class Member:
    """One Triton: its channel, the replicas of its models, and the tasks that watch them.

    Args:
        channel: to the Triton; closed with the member.
        policy: how health is watched.
        idle_timeout_s: for the delta channels; None: there are to be none.
        observer: hears of its replicas' health while it is present.
        changed: called when a replica became unable to take requests.
    """

    def __init__(
        self,
        channel: Channel,
        policy: HealthPolicy,
        *,
        idle_timeout_s: float | None,
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
        """Begin to watch a model on it."""
        replica = Replica(model, self.channel, self._policy, self, link=self._new_link(model))
        self.replicas[model] = replica
        self.spawn(replica.watch(), f"watch {model} on {self.channel.address}")
        return replica

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` until the member is closed."""
        self._tasks.append(asyncio.create_task(work, name=name))

    def become(self, state: MemberState) -> None:
        """Enter `state`; who comes back is told of anew."""
        self.state = state
        for replica in self.replicas.values():
            healthy = replica.state is ReplicaState.READY
            self.upstream_health(replica.model, replica.upstream, healthy=healthy)

    async def idle(self) -> None:
        """Wait until no request runs on it."""
        while busy := [replica for replica in self.replicas.values() if replica.outstanding]:
            await busy[0].idle()

    async def close(self, fault: Fault, detail: str) -> None:
        """Stop watching, and end with `fault` what runs there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas.values():
            await replica.close()
        await self.channel.close(fault, detail)

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        """Pass on what a replica says of itself, unless nobody is to hear of this member any more."""
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

    def _new_link(self, model: str) -> DeltaLink | None:
        if self._idle_timeout_s is None:
            return None
        backoff = Backoff(self._policy.backoff_first_s, self._policy.backoff_limit_s)
        return DeltaLink(model, self.channel, idle_timeout_s=self._idle_timeout_s, backoff=backoff)


class Members:
    """All of them. `start` must be called inside the event loop.

    Args:
        upstreams: addresses `host:port`, and names `dns:///host:port`.
        make: returns a new member for an address, with its models.
        policy: its pauses are those between looks at a name of which no Triton serves.
        interval_s: seconds between two looks at a name otherwise.
        resolve: does the looking.
        observer: hears of what comes and goes.
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
        """The addresses that each name led to, as far as known."""
        self._members: dict[str, Member] = {}
        """Present and leaving ones by address."""
        self._looking: list[asyncio.Task[None]] = []
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """What waits for the end of the leaving ones, by address."""
        self._seeing_off: set[asyncio.Task[None]] = set()
        """The same, and what closes those that are gone."""

    def start(self) -> None:
        """Take in those whose address is known, and begin to look for the others."""
        self._settle()
        self._looking += [asyncio.create_task(watch.watch()) for watch in self._watches]

    async def close(self) -> None:
        """Close all of them; what runs there ends with `Fault.CLOSED`."""
        for task in (*self._looking, *self._leaving.values()):
            task.cancel()
        await asyncio.gather(*self._looking, *self._seeing_off, return_exceptions=True)
        for member in self._members.values():
            await member.close(Fault.CLOSED, "the pool was closed")

    def present(self) -> list[Member]:
        """Return those that may be asked for something new."""
        return [member for member in self._members.values() if member.state is MemberState.PRESENT]

    def of(self, channel: Channel) -> Member | None:
        """Return the one that `channel` leads to, present or leaving."""
        member = self._members.get(channel.address)
        return member if member is not None and member.channel is channel else None

    def lost_health(self, member: Member) -> None:
        """Look again at the names that led to `member` if they lead to none that serves."""
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
            # Of a resolver that has just lost its own data, too. Who serves is there, whatever it says.
            addresses = [address for address in self._led_to.get(name, ()) if self._is_ready(address)]
        self._led_to[name] = addresses
        self._settle()

    def _is_ready(self, address: str) -> bool:
        member = self._members.get(address)
        return member is not None and member.ready

    def _settle(self) -> None:
        """Have for members those that are named, and no others."""
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
        # From here on it cannot come back: the same address would be another member.
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
