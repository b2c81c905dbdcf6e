"""The Tritons behind the gateway: those configured by address, and those found behind names.

A backend is one address of a Triton, with one client and the models on it, however many names lead there.

    present ──its last name lost it──▶ leaving ──nothing runs there any more──▶ gone
       ▲                                  │
       └────────────found again───────────┘

Only present backends get new requests. Names are looked up again and again. If the configuration names no
models, each backend's repository is read periodically: what is loaded and has the inputs of a known contract
is served. Knows nothing of requests.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence

from gateway.core.backoff import Backoff
from gateway.errors import UpstreamProtocolError
from gateway.triton.client import Client, EntryState, Tls
from gateway.triton.errors import Fault, TritonError
from gateway.triton.faults import warn_of_faults
from gateway.triton.options import PoolOptions
from gateway.triton.replicas import Replica, ReplicaState
from gateway.triton.resolver import Name, client_tls, name_in

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_FORGET_AFTER_S = 60.0
"""How long a backend's error counters outlive it, so that Prometheus reads the last errors."""

_NO_FAULT_OF_ENTRY = {Fault.UNREACHABLE, Fault.DEADLINE, Fault.CLOSED}
"""Failures to read an entry's inputs that are the server's."""


class Outcome(enum.StrEnum):
    """The result of a lookup; the value is the label `outcome` of `tritongate_upstream_lookups_total`."""

    FOUND = "found"
    NONE = "none"
    """The name has no addresses, or does not exist."""
    FAILED = "failed"
    """No answer."""


class Backend:
    """One Triton: its client, the replicas of its models, and the tasks that watch them."""

    def __init__(self, address: str, options: PoolOptions, tls: Tls | None = None) -> None:
        self.client = Client(
            address,
            repository_key=options.repository_key,
            timeout_s=options.health.probe_timeout_s,
            tls=tls,
        )
        self.replicas: dict[str, Replica] = {}
        """By model."""
        self.listed = False
        """Whether its repository was read."""
        self.leaving: asyncio.Task[None] | None = None
        """Waits until nothing runs there, to close it; None: it may get new requests."""
        self._options = options
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        """Those of `replicas`, by model."""
        self._closed: tuple[Fault, str] | None = None
        if options.warn_of_faults:
            self._spawn(warn_of_faults(self.client), f"look for faults of {address}")
        for model in options.models:
            self.add(model)
        if not options.models:
            self._spawn(self._discover(), f"discover on {address}")

    @property
    def address(self) -> str:
        """`host:port` of the Triton."""
        return self.client.address

    @property
    def ready(self) -> bool:
        """Whether any model on it takes requests."""
        return any(replica.state is ReplicaState.READY for replica in self.replicas.values())

    def add(self, model: str) -> Replica:
        """Return the replica of a model on it, watched from now on.

        Raises:
            TritonError: it was closed.
        """
        if self._closed is not None:
            raise TritonError(*self._closed)
        replica = self.replicas.get(model)
        if replica is None:
            replica = self.replicas[model] = Replica(model, self.client, self._options)
            self._watches[model] = self._spawn(replica.watch(), f"watch {model} on {self.address}")
        return replica

    async def close(self, fault: Fault, detail: str) -> None:
        """Stop watching, and end its running requests with `fault`."""
        self._closed = fault, detail
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas.values():
            await replica.channel.close()
        await self.client.close(fault, detail)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _discover(self) -> None:
        """Look for models for ever, with growing pauses while the Triton does not answer."""
        policy = self._options.health
        backoff = Backoff(policy.backoff_first_s, policy.backoff_limit_s)
        rejected: set[str] = set()
        reachable = True
        while True:
            try:
                await self._add_models(rejected)
            except TritonError as error:
                if reachable:
                    extra = {"upstream": self.address, "detail": error.detail}
                    _log.warning("models cannot be listed: %s", error.fault.code, extra=extra)
                reachable = False
                await asyncio.sleep(backoff.next())
            else:
                reachable = self.listed = True
                backoff.reset()
                await asyncio.sleep(policy.interval_s)

    async def examine(self, model: str) -> Replica:
        """Return the replica of a loaded model, if it has a contract that is known.

        Raises:
            UpstreamProtocolError: it has none.
            TritonError: it cannot be asked.
        """
        metadata = await self.client.metadata(model)
        await asyncio.to_thread(self._options.dialects.of, model, metadata)
        return self.add(model)

    async def _forget(self, model: str) -> None:
        """Watch a model no longer that was deleted from the disk, unless it still serves."""
        replica = self.replicas[model]
        if replica.state is not ReplicaState.READY and not replica.outstanding:
            del self.replicas[model]
            watch = self._watches.pop(model)
            watch.cancel()
            await asyncio.wait({watch})
            await replica.channel.close()

    async def _add_models(self, rejected: set[str]) -> None:
        """Add the models that are loaded; `rejected` are those that were logged as of another contract."""
        states = await self.client.repository()
        for entry in self.replicas.keys() - states.keys():
            await self._forget(entry)
        loaded = {entry for entry, state in states.items() if state is EntryState.READY}
        if self._options.on_demand is not None:
            for entry in sorted(states.keys() - loaded - self.replicas.keys() - rejected):
                self.add(entry)  # its contract is not known before it is loaded
        # An entry that was unloaded may come back with another contract.
        rejected &= loaded
        for entry in sorted(loaded - self.replicas.keys() - rejected):
            try:
                await self.examine(entry)
            except TritonError as error:
                if error.fault in _NO_FAULT_OF_ENTRY:
                    raise
                # It is just being unloaded, or broken: the next look will tell.
            except UpstreamProtocolError as error:
                _log.info("model left out: %s", error.message, extra={"upstream": self.address})
                rejected.add(entry)


class Backends:
    """All backends, of addresses `host:port` and names `dns:///host:port`. Call `start` inside the loop."""

    def __init__(self, upstreams: Sequence[str], options: PoolOptions) -> None:
        self._fixed = [upstream for upstream in upstreams if name_in(upstream) is None]
        self._names = [name for name in map(name_in, dict.fromkeys(upstreams)) if name is not None]
        self._options = options
        self._led_to: dict[Name, Sequence[str]] = {}
        """The last known addresses of each name."""
        self._backends: dict[str, Backend] = {}
        """Present and leaving ones by address."""
        self._models = dict.fromkeys(options.models, int(time.time()))
        self._watches: list[asyncio.Task[None]] = []
        self._departures: set[asyncio.Task[None]] = set()
        """Tasks that wait for leaving backends to become idle, and then close them."""

    def start(self) -> None:
        """Add the configured addresses, and start looking up the names."""
        self._settle()
        self._watches += [asyncio.create_task(self._watch(name)) for name in self._names]

    async def close(self) -> None:
        """Close all backends; their running requests end with `Fault.CLOSED`."""
        for task in (*self._watches, *(each.leaving for each in self._backends.values() if each.leaving)):
            task.cancel()
        await asyncio.gather(*self._watches, *self._departures, return_exceptions=True)
        for backend in self._backends.values():
            await backend.close(Fault.CLOSED, "the pool was closed")

    def present(self) -> list[Backend]:
        """Return the backends that may get new requests."""
        return [backend for backend in self._backends.values() if backend.leaving is None]

    def replicas(self, model: str) -> list[Replica]:
        """Return the replicas of a model that may get new requests, if they are ready."""
        return [backend.replicas[model] for backend in self.present() if model in backend.replicas]

    def models(self) -> Mapping[str, int]:
        """Return the models to be served, each with the Unix time in seconds at which it was first seen.

        Models that were found stay while their Tritons are down, but not when their last Triton has left, or
        has them on its disk no longer, and all others were read.
        """
        if not self._options.models:
            present = self.present()
            found = {model for backend in present for model in backend.replicas}
            if present and all(backend.listed for backend in present):
                self._models = {model: seen for model, seen in self._models.items() if model in found}
            for model in sorted(found):
                self._models.setdefault(model, int(time.time()))
        return self._models

    async def _watch(self, name: Name) -> None:
        """Look `name` up for ever: at an interval, with growing pauses while none of its Tritons serves."""
        policy, clock = self._options.health, asyncio.get_running_loop().time
        backoff = Backoff(policy.backoff_first_s, policy.backoff_limit_s)
        outcome = Outcome.FOUND
        while True:
            outcome = await self._look_up(name, outcome)
            if not self._serves(name):
                await asyncio.sleep(min(backoff.next(), self._options.resolve_interval_s))
                continue
            backoff.reset()
            again = clock() + self._options.resolve_interval_s
            # A lookup is due at once when the last of its Tritons fails.
            while self._serves(name) and (left_s := again - clock()) > 0:  # noqa: ASYNC110 - they have no event
                await asyncio.sleep(min(left_s, policy.backoff_first_s))

    async def _look_up(self, name: Name, before: Outcome) -> Outcome:
        """Look `name` up once, and make what it leads to backends; `before` is what came of the last look."""
        addresses: Sequence[str] = ()
        detail = ""
        try:
            addresses = await self._options.resolve(name.host, name.port)
        except OSError as error:
            outcome, detail = Outcome.FAILED, error.strerror or str(error)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task, and without it the name is frozen
            outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error}"
        else:
            outcome = Outcome.FOUND if addresses else Outcome.NONE
        if outcome is not before:
            level = logging.INFO if outcome is Outcome.FOUND else logging.WARNING
            extra = {"upstream": name.upstream, "detail": detail}
            _log.log(level, "addresses of a name: %s", outcome.value, extra=extra)
        self._options.metrics.upstream_lookup(name.upstream, outcome)
        if outcome is Outcome.NONE:
            # The resolver may have lost its data: a backend that serves exists, whatever the resolver says.
            addresses = [address for address in self._led_to.get(name, ()) if self._is_ready(address)]
        if outcome is not Outcome.FAILED:
            self._led_to[name] = addresses
            self._settle()
        return outcome

    def _serves(self, name: Name) -> bool:
        return any(self._is_ready(address) for address in self._led_to.get(name, ()))

    def _is_ready(self, address: str) -> bool:
        backend = self._backends.get(address)
        return backend is not None and backend.ready

    def _settle(self) -> None:
        """Make the named addresses, and no others, the backends."""
        wanted = {address: address for address in self._fixed}
        for name, led in self._led_to.items():
            for address in led:
                wanted.setdefault(address, name.upstream)
        for address, upstream in wanted.items():
            backend = self._backends.get(address)
            if backend is None:
                self._backends[address] = Backend(
                    address, self._options, client_tls(upstream, self._options.tls_of)
                )
                self._log(address, "appeared")
            elif backend.leaving is not None:
                backend.leaving.cancel()
                backend.leaving = None
                self._log(address, "came back")
        for backend in self.present():
            if backend.address not in wanted:
                self._lose(backend)

    def _lose(self, backend: Backend) -> None:
        task = asyncio.create_task(self._see_off(backend), name=f"see off {backend.address}")
        self._departures.add(task)
        task.add_done_callback(self._departures.discard)
        backend.leaving = task
        self._log(backend.address, "left")

    async def _see_off(self, backend: Backend) -> None:
        while any(each.outstanding for each in backend.replicas.values()):  # noqa: ASYNC110 - nobody waits
            await asyncio.sleep(_POLL_S)
        # From here on it cannot come back: the same address would be a new backend.
        del self._backends[backend.address]
        await backend.close(Fault.UNREACHABLE, "no name leads to this address any more")
        asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._forget, backend.address)

    def _forget(self, address: str) -> None:
        if address not in self._backends:
            self._options.metrics.upstream_forgotten(address)

    def _log(self, address: str, what: str) -> None:
        if address not in self._fixed:
            _log.info("upstream %s", what, extra={"upstream": address})
