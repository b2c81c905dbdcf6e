"""The health of a model on a Triton: its states, how it is watched, and who is told."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.dialects.base import ModelReport
from gateway.triton.status import Fault, TritonError


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
        """A generation failed on `upstream`; `code` is a value of `gateway.triton.status.Fault`."""
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
