"""One model on one Triton: its health, its delta channel, and how many requests it is running.

Health is determined by probes, sent to the model itself where its contract has them, because Triton goes on
calling a model ready after its process has died. A request whose failure suggests that the replica is at
fault has it probed at once, which decides; unless a connection broke, it is out of the selection until then.
One that comes back is on trial: a passed probe says that its model was loaded and its engine goes round, or,
of models without probes, only that Triton calls it ready. None runs the model for a client.

Knows nothing of requests beyond their number, nor of other replicas.
"""

import asyncio
import contextlib
import enum
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gateway.core.backoff import Backoff
from gateway.errors import GatewayError, UpstreamProtocolError
from gateway.triton.channel import DeltaChannel
from gateway.triton.client import Client, EntryState
from gateway.triton.dialects.base import Dialect, ModelReport, TokenizerFiles
from gateway.triton.errors import Fault, TritonError
from gateway.triton.options import PoolOptions

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


_STATE_AFTER = {
    Fault.UNREACHABLE: ReplicaState.UNREACHABLE,
    Fault.NOT_READY: ReplicaState.NOT_READY,
    Fault.STUB_DEAD: ReplicaState.STUCK,
    Fault.SILENT: ReplicaState.STUCK,
}
"""Faults of a request that put its replica in doubt, and its state until the next probe."""

_BROKEN = frozenset({Fault.UNREACHABLE, Fault.CHANNEL_LOST})
"""Faults of a connection, which may have been that of one stream, or the end of the server."""

_LATE = frozenset({Fault.DEADLINE, Fault.SILENT})
"""Faults of a probe that had no answer in time, on either side's account."""

TRIAL_LIMIT = 4
"""Requests at once on a replica that came back and has answered nothing yet, if there are other replicas."""

_FILES_TIMEOUT_S = 60.0
"""For the files of a tokenizer: some MiB, perhaps from far away."""

_FAULT_OF = {
    ReplicaState.UNREACHABLE: Fault.UNREACHABLE,
    ReplicaState.STUCK: Fault.SILENT,
    ReplicaState.UNLOADED: Fault.UNLOADED,
}


def unable(replicas: Sequence["Replica"]) -> TritonError:
    """Return the error for a request when none of a model's replicas is ready, or there is none."""
    states = {replica.state for replica in replicas}
    fault = _FAULT_OF.get(states.pop(), Fault.NOT_READY) if len(states) == 1 else Fault.NOT_READY
    reasons = "; ".join(f"{replica.upstream}: {replica.state}: {replica.reason}" for replica in replicas)
    return TritonError(fault, reasons or "no Triton with the model is known")


def _loaded_anew(before: ModelReport | None, now: ModelReport) -> bool:
    """Return whether the model was loaded between two reports, and so perhaps has another tokenizer."""
    if before is None or before.begun is None or now.begun is None:
        return False
    return now.begun < before.begun


class Replica:
    """One model, which is an entry of that name, on one Triton; run `watch`, its health loop, as a task."""

    def __init__(self, model: str, client: Client, options: PoolOptions) -> None:
        self.model = model
        self.client = client
        self.channel = DeltaChannel(
            model,
            client,
            idle_timeout_s=options.idle_timeout_s,
            backoff=Backoff(options.health.backoff_first_s, options.health.backoff_limit_s),
        )
        """Its delta channel: open while it is ready, if its contract has them."""
        self.state = ReplicaState.UNKNOWN
        self.reason = "not reached yet"
        self.report: ModelReport | None = None
        """The answer to the latest probe, kept while the replica is down; None until there was one."""
        self.outstanding = 0
        """Number of requests running on it."""
        self.last_chosen = 0
        self.on_trial = False
        """Whether it came back and has answered nothing since: whoever gets an answer clears it."""
        self.on_demand = options.on_demand is not None
        """Whether a request loads it."""
        self.wanted = not self.on_demand
        """Whether it is meant to be loaded."""
        self.yielding = False
        """It gets no new requests: when those that run have ended, it makes room for another model."""
        self.in_use_elsewhere = False
        """Whether requests of others run on it, as far as can be told; only of what is loaded on demand."""
        self.used_elsewhere_at = -math.inf
        """When that was last so, or others' requests were found to have ended, on the event loop's clock."""
        self._ended = 0
        """Number of requests of this process that have."""
        self._ended_before = 0
        """The same when the latest look began."""
        self._begun_there: int | None = None
        """Number of anybody's requests since it was loaded, at the latest look; None: not known."""
        self._withdrawn = False
        self._loads = False
        """Whether Triton loads it, at the latest look that found it not ready."""
        self._failed = False
        """Whether it was found dead or stuck, and has not answered since."""
        self._ready = asyncio.Event()
        self._dialect: Dialect | None = None
        self._dialects = options.dialects
        self._contract: tuple[object, Dialect] | None = None
        """What Triton said of the model's tensors, and the dialect that it was found to have."""
        self._policy = options.health
        self._suspected = asyncio.Event()
        self._looked = asyncio.Event()
        """Set once the next look has ended."""

    @property
    def upstream(self) -> str:
        """The address of its Triton."""
        return self.client.address

    @property
    def loading(self) -> bool:
        """Whether it is being loaded, by this process or another."""
        return self.state is ReplicaState.NOT_READY and (self._withdrawn or self._loads)

    @property
    def has_room(self) -> bool:
        """Whether it takes another request while it is on trial, if it is."""
        return not self.on_trial or self.outstanding < TRIAL_LIMIT

    @property
    def dialect(self) -> str | None:
        """The name of its dialect; None while it is not ready."""
        return None if self._dialect is None else self._dialect.name

    def serving(self) -> tuple[Dialect, ModelReport]:
        """Return the dialect and the report that a request to it needs.

        Raises:
            TritonError: it is not ready.
        """
        if self.state is not ReplicaState.READY or self._dialect is None or self.report is None:
            raise unable([self])
        return self._dialect, self.report

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request as running on this replica."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1
            self._ended += 1

    @contextlib.contextmanager
    def withdrawn(self, *, wanted: bool) -> Iterator[None]:
        """Send no new requests here during the block, because the model is being loaded or unloaded.

        `wanted`: it is meant to be loaded afterwards.
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

    def look_now(self) -> asyncio.Event:
        """Probe it soon; returns what is set once that is done."""
        self._suspected.set()
        return self._looked

    def suspect(self, error: TritonError) -> bool:
        """Record that a request failed here, and probe it at once if that may be the replica's fault.

        Returns whether it may be down: the next probe tells.

        It stays selected if only a connection broke: the probe tells within milliseconds what it was. So it
        does if one request was silent while others had tokens. What else failed might cost the next request
        its idle timeout.
        """
        stays = error.fault in _BROKEN or (error.fault is Fault.SILENT and self._delivers())
        state = None if stays else _STATE_AFTER.get(error.fault)
        if state is not None:
            self._become(state, error.detail)
        if state is not None or stays:
            self._suspected.set()
        return self.state is not ReplicaState.READY or error.fault in _BROKEN

    def _delivers(self) -> bool:
        """Whether the model sent tokens of late: it is busy then, and neither stuck nor away."""
        now = asyncio.get_running_loop().time()
        return now - self.channel.delivered_at < self._policy.probe_timeout_s / 2

    async def watch(self) -> None:
        """Probe for ever: at an interval while ready, otherwise with growing pauses; at once if suspected."""
        backoff = Backoff(self._policy.backoff_first_s, self._policy.backoff_limit_s)
        while True:
            self._suspected.clear()
            looked, self._looked = self._looked, asyncio.Event()
            before = self.state
            await self._look()
            looked.set()
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
            if error.fault is Fault.QUEUE_FULL or (error.fault in _LATE and self._delivers()):
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
            if age is not None and age > self._policy.stuck_after_s:
                self._become(ReplicaState.STUCK, f"a thread of the model has been stuck for {age:.0f} s")
                return
            await self._open_channel()
            if self._dialect is not None:  # else it was suspected meanwhile, and is looked at again at once
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
        ended = self._ended
        dialect = self._dialect
        if dialect is None or dialect.probe is None:  # a probe fails where the model has become another
            dialect = await self._find_dialect()
        if dialect.probe is None:
            if not await self.client.ready(self.model):
                raise TritonError(Fault.NOT_READY, "Triton does not call it ready")
            report = dialect.report
        else:
            deadline = asyncio.get_running_loop().time() + self._policy.probe_timeout_s
            probe = dialect.probe
            responses = await self.client.infer(probe.request(self.model), deadline=deadline)
            report = probe.read(responses)
            if _loaded_anew(self.report, report):
                dialect = await self._find_dialect()
            if report.chat_format is None and dialect.tokenizer_files is not None:
                dialect = await self._with_tokenizer(dialect, dialect.tokenizer_files)
                report = (dialect.probe or probe).read(responses)
        if self.on_demand:
            await self._note_others(report)
            self._ended_before = ended
        self._dialect = dialect  # `suspect` may have removed it meanwhile
        return report

    async def _find_dialect(self) -> Dialect:
        """Return the dialect of what Triton has loaded now, which it may reload while it calls it ready."""
        metadata = await self.client.metadata(self.model)
        if self._dialect is None or self._contract is None or metadata != self._contract[0]:
            self._contract = metadata, await asyncio.to_thread(self._dialects.of, self.model, metadata)
        dialect = self._contract[1]
        if dialect.streams is None:
            dialect = replace(dialect, streams=await self.client.decoupled(self.model))
        return dialect

    async def _with_tokenizer(self, dialect: Dialect, files: TokenizerFiles) -> Dialect:
        """Return the dialect with the tokenizer that the model sends, or without one if it has none to use.

        Raises:
            TritonError: it could not be asked.
        """
        deadline = asyncio.get_running_loop().time() + _FILES_TIMEOUT_S
        try:
            responses = await self.client.infer(files.request(self.model), deadline=deadline)
            return await asyncio.to_thread(files.read, responses)
        except TritonError as error:
            if error.fault is not Fault.INVALID_REQUEST:  # the answer of an engine older than the question
                raise
            reason = error.detail
        except UpstreamProtocolError as error:
            reason = error.message
        _log.warning(
            "chats are refused: the gateway has no tokenizer of the model; set tokenizers to NAME=FOLDER",
            extra={"model": self.model, "upstream": self.upstream, "detail": reason},
        )
        return replace(dialect, tokenizer_files=None)

    async def _note_others(self, report: ModelReport) -> None:
        """Note whether others use it: requests run, or more have begun than those of this process can be.

        A short one is hardly ever seen while it runs.
        """
        before, self._begun_there = self._begun_there, report.begun
        if report.open is None:  # it has no probe: Triton counts
            with contextlib.suppress(TritonError):  # this may be restricted, which is no fault of the model
                self._begun_there = await self.client.inferences(self.model)
        own = self._ended + self.outstanding - self._ended_before  # all that may have begun there since
        began = before is not None and self._begun_there is not None and self._begun_there - before > own
        running = began if report.open is None else report.open > 0
        self.in_use_elsewhere = running and not self.outstanding
        if began or self.in_use_elsewhere:
            self.used_elsewhere_at = asyncio.get_running_loop().time()

    async def _judge(self, error: TritonError) -> tuple[ReplicaState, str]:
        """Return the state after a failed probe, and the reason."""
        if error.fault in _LATE:
            return await self._why_silent(), "no answer to a probe"
        if error.fault is Fault.NOT_READY:
            return await self._why_not_ready(), error.detail
        return _STATE_AFTER.get(error.fault, ReplicaState.NOT_READY), error.detail

    async def _why_silent(self) -> ReplicaState:
        """Distinguish a model that does not answer from a server that does not."""
        try:
            await self.client.live()
        except TritonError:
            return ReplicaState.UNREACHABLE
        return ReplicaState.STUCK

    async def _why_not_ready(self) -> ReplicaState:
        """Distinguish a model that was unloaded on purpose from one that should be there."""
        try:
            entry = (await self.client.repository()).get(self.model)
        except TritonError:
            return self._away()
        if entry not in (EntryState.READY, EntryState.UNLOADING):
            # It died and is being repaired, faster than a probe could see: nothing runs there any more.
            # On demand, another gateway may have unloaded it just before the request came.
            fault = Fault.UNLOADED if self.on_demand else Fault.STUB_DEAD
            self.client.end_inference(self.model, fault, "it was unloaded under the request")
        self._loads = entry is EntryState.LOADING
        if self._loads:
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
        self.on_trial = state is ReplicaState.READY and self.state is not ReplicaState.UNKNOWN
        self.state = state
        level = logging.INFO if state is ReplicaState.READY else logging.WARNING
        _log.log(
            level,
            "replica is %s",
            state.value,
            extra={"model": self.model, "upstream": self.upstream, "detail": reason},
        )
