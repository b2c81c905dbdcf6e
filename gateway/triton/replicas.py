"""One model on one Triton: its health, its delta channel, and how many requests it is running.

Health is determined by probes (`{"probe": true}`, sent to the model itself), because Triton goes on calling a
model ready after its process has died. A generation whose failure suggests that the replica is at fault takes
it out of the selection at once; an immediate probe then decides.

Knows nothing of generations beyond their number, nor of other replicas.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.dialects.base import Dialect, ModelReport
from gateway.dialects.registry import choose
from gateway.errors import GatewayError
from gateway.triton.backoff import Backoff
from gateway.triton.channel import DeltaChannel
from gateway.triton.client import Client, Control, EntryState
from gateway.triton.errors import Fault, TritonError

_log = logging.getLogger(__name__)


class ReplicaState(enum.StrEnum):
    """Only READY takes requests."""

    UNKNOWN = "unknown"
    """Not probed yet."""
    READY = "ready"
    NOT_READY = "not_ready"
    """The server answers, but the model does not serve: unknown, loading, broken, or of another contract."""
    UNLOADED = "unloaded"
    """It was unloaded on purpose, through the gateway or Triton: it is not meant to serve."""
    UNREACHABLE = "unreachable"
    STUCK = "stuck"
    """The model's process is dead, or makes no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """How health is watched; all values in seconds."""

    interval_s: float = 1.0
    """Between probes of a replica that is ready."""
    probe_timeout_s: float = 5.0
    stuck_after_s: float = 60.0
    """An engine whose last loop iteration is older than this is stuck; on a slow CPU a step takes seconds."""
    backoff_first_s: float = 0.25
    backoff_limit_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica as `tritongate check` and logs show it."""

    model: str
    upstream: str
    state: ReplicaState
    reason: str
    report: ModelReport | None
    """The answer to the latest probe; None until there was one."""


class UpstreamObserver(Protocol):
    """Told of health and errors, for metrics. Called on the event loop; must not block."""

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        """`model` on `upstream` became able, or unable, to take requests."""
        ...

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        """A generation failed on `upstream`; `code` is a value of `gateway.triton.errors.Fault`."""
        ...


STATE_AFTER = {
    Fault.UNREACHABLE: ReplicaState.UNREACHABLE,
    Fault.NOT_READY: ReplicaState.NOT_READY,
    Fault.STUB_DEAD: ReplicaState.STUCK,
    Fault.SILENT: ReplicaState.STUCK,
}
"""Faults of a generation that put its replica in doubt, and its state until the next probe."""

_FAULT_OF = {
    ReplicaState.UNREACHABLE: Fault.UNREACHABLE,
    ReplicaState.STUCK: Fault.SILENT,
    ReplicaState.UNLOADED: Fault.UNLOADED,
}


def unable(reports: Sequence[ReplicaReport]) -> TritonError:
    """Return the error for a request when none of a model's replicas is ready, or there is none."""
    states = {report.state for report in reports}
    fault = _FAULT_OF.get(states.pop(), Fault.NOT_READY) if len(states) == 1 else Fault.NOT_READY
    reasons = "; ".join(f"{report.upstream}: {report.state}: {report.reason}" for report in reports)
    return TritonError(fault, reasons or "no Triton with the model is known")


class Replica:
    """One model on one Triton; run `watch`, its health loop, as a task.

    Args:
        model: its id, which is the name of its repository entry.
        client: of the Triton.
        policy: how to watch.
        observer: told when it becomes able or unable to take requests.
        idle_timeout_s: for its delta channel.
    """

    def __init__(
        self,
        model: str,
        client: Client,
        policy: HealthPolicy,
        observer: UpstreamObserver | None,
        *,
        idle_timeout_s: float,
    ) -> None:
        self.model = model
        self.client = client
        self.channel = DeltaChannel(
            model,
            client,
            idle_timeout_s=idle_timeout_s,
            backoff=Backoff(policy.backoff_first_s, policy.backoff_limit_s),
        )
        """Its delta channel: open while it is ready, if its contract has them."""
        self.state = ReplicaState.UNKNOWN
        self.reason = "not reached yet"
        self.report: ModelReport | None = None
        """The latest one, kept while the replica is down."""
        self.outstanding = 0
        """Number of generations running on it."""
        self.last_chosen = 0
        self.wanted = True
        """Whether it is meant to be loaded."""
        self._withdrawn = False
        self._failed = False
        """Whether it was found dead or stuck, and has not answered since."""
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dialect: Dialect | None = None
        self.control = Control(client, timeout_s=policy.probe_timeout_s)
        self._policy = policy
        self._observer = observer
        self._suspected = asyncio.Event()
        self._tell_observer()

    @property
    def upstream(self) -> str:
        """The address of its Triton."""
        return self.client.address

    def describe(self) -> ReplicaReport:
        """Return its current state."""
        return ReplicaReport(
            model=self.model, upstream=self.upstream, state=self.state, reason=self.reason, report=self.report
        )

    def serving(self) -> tuple[Dialect, ModelReport]:
        """Return the dialect and the report that a request to it needs.

        Raises:
            TritonError: it is not ready.
        """
        if self.state is not ReplicaState.READY or self._dialect is None or self.report is None:
            raise unable([self.describe()])
        return self._dialect, self.report

    async def close(self) -> None:
        """Close its delta channel; cancel `watch` first."""
        await self.channel.close()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a generation as running on this replica."""
        self.outstanding += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.outstanding -= 1
            if not self.outstanding:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no generation runs on this replica."""
        await self._idle.wait()

    @contextlib.contextmanager
    def withdrawn(self, *, wanted: bool) -> Iterator[None]:
        """Send no new requests here during the block, because the model is being loaded or unloaded.

        Args:
            wanted: whether it is meant to be loaded afterwards.
        """
        self.wanted, self._failed = wanted, False
        self._become(self._away(), "being loaded anew" if wanted else "being unloaded")
        self._withdrawn = True
        try:
            yield
        finally:
            self._withdrawn = False
            self._suspected.set()

    async def ready_within(self, timeout_s: float) -> bool:
        """Probe it at once, and wait until it is ready; False if `timeout_s` passed first."""
        self._suspected.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def suspect(self, error: TritonError) -> None:
        """Record that a generation failed here."""
        state = STATE_AFTER.get(error.fault)
        if state is not None:
            self._become(state, error.detail)
            self._suspected.set()

    async def watch(self) -> None:
        """Probe for ever: at an interval while ready, otherwise with growing pauses; at once if suspected."""
        backoff = Backoff(self._policy.backoff_first_s, self._policy.backoff_limit_s)
        while True:
            self._suspected.clear()
            before = self.state
            await self._look()
            if self.state is not before:
                # Also between two bad states: a server that is back and loading will soon be ready.
                backoff.reset()
            delay = self._policy.interval_s if self.state is ReplicaState.READY else backoff.next()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._suspected.wait()

    async def _look(self) -> None:
        try:
            self.report = await self._probe()
        except TritonError as error:
            if error.fault is Fault.QUEUE_FULL:
                return  # busy, not dead: the state stays
            if error.fault is Fault.STUB_DEAD:
                # This fault is certain: requests there would hang until their deadline.
                self.client.end_inference(self.model, error.fault, error.detail)
            self._become(*await self._judge(error))
        except GatewayError as error:
            self._become(ReplicaState.NOT_READY, error.message)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a task that nobody awaits
            # If the task ended here, the replica's health would stay frozen.
            _log.exception("health check failed", extra={"model": self.model, "upstream": self.upstream})
            self._become(ReplicaState.NOT_READY, f"the health check failed: {type(error).__name__}")
        else:
            age = self.report.heartbeat_age_s
            if age > self._policy.stuck_after_s:
                self._become(ReplicaState.STUCK, f"the engine last made a step {age:.0f} s ago")
            else:
                await self._open_channel()
                if (
                    self._dialect is not None
                ):  # else it was suspected meanwhile, and is looked at again at once
                    self._become(ReplicaState.READY, "")

    async def _open_channel(self) -> None:
        """Open the channel before it is called ready, so that whoever was told so can stream at once."""
        channels = None if self._dialect is None else self._dialect.channels
        if channels is None or self._withdrawn or self.state is ReplicaState.READY:
            return
        self.channel.start(channels)
        with contextlib.suppress(TritonError):  # What does not stream can be served without.
            await self.channel.opened()

    async def _probe(self) -> ModelReport:
        dialect = self._dialect
        if dialect is None:
            dialect = choose(self.model, await self.control.inputs(self.model))
        timeout_s = self._policy.probe_timeout_s
        responses = self.client.stream_infer(
            dialect.probe(self.model),
            deadline=asyncio.get_running_loop().time() + timeout_s,
            idle_timeout_s=timeout_s,
        )
        async with contextlib.aclosing(responses):
            report = dialect.read_probe([response async for response in responses])
        self._dialect = dialect  # `suspect` may have removed it meanwhile
        return report

    async def _judge(self, error: TritonError) -> tuple[ReplicaState, str]:
        """Return the state after a failed probe, and the reason."""
        if error.fault in (Fault.DEADLINE, Fault.SILENT):
            return await self._why_silent(), "no answer to a probe"
        if error.fault is Fault.NOT_READY:
            return await self._why_not_ready(), error.detail
        return STATE_AFTER.get(error.fault, ReplicaState.NOT_READY), error.detail

    async def _why_silent(self) -> ReplicaState:
        """Distinguish a model that does not answer from a server that does not."""
        try:
            await self.control.live()
        except TritonError:
            return ReplicaState.UNREACHABLE
        return ReplicaState.STUCK

    async def _why_not_ready(self) -> ReplicaState:
        """Distinguish a model that was unloaded on purpose from one that should be there."""
        try:
            entry = (await self.control.repository()).get(self.model)
        except TritonError:
            return self._away()
        if entry is EntryState.LOADING:
            return ReplicaState.NOT_READY
        if entry in (EntryState.UNLOADED, EntryState.UNLOADING) and not self._failed:
            # Unloading a failed model is part of its repair: it is meant to come back.
            return ReplicaState.UNLOADED
        return self._away()

    def _away(self) -> ReplicaState:
        return ReplicaState.NOT_READY if self.wanted else ReplicaState.UNLOADED

    def _become(self, state: ReplicaState, reason: str) -> None:
        if self._withdrawn:
            return  # probes do not count meanwhile
        if state is not ReplicaState.UNREACHABLE:
            self.wanted = state is not ReplicaState.UNLOADED
        if state is ReplicaState.READY:
            self._failed = False
            self._ready.set()
            if self._dialect is not None and self._dialect.channels is not None:
                self.channel.start(self._dialect.channels)
        else:
            # It may come back as another model, and cannot be unloaded while a channel is open.
            self._dialect = None
            self.channel.retire()
            self._ready.clear()
        if state is ReplicaState.STUCK:
            self._failed = True
        self.reason = reason
        if state is self.state:
            return
        self.state = state
        level = logging.INFO if state is ReplicaState.READY else logging.WARNING
        _log.log(
            level,
            "replica is %s",
            state.value,
            extra={"model": self.model, "upstream": self.upstream, "detail": reason},
        )
        self._tell_observer()

    def _tell_observer(self) -> None:
        if self._observer is not None:
            healthy = self.state is ReplicaState.READY
            self._observer.upstream_health(self.model, self.upstream, healthy=healthy)
