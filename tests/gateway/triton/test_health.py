"""What a request is told when no replica is ready."""

import pytest

from gateway.triton.health import ReplicaReport, ReplicaState, unable
from gateway.triton.status import Fault


def report(state: ReplicaState) -> ReplicaReport:
    return ReplicaReport(model="m", upstream="somewhere:8001", state=state, reason="why", report=None)


@pytest.mark.parametrize(
    ("states", "fault"),
    [
        ([], Fault.NOT_READY),
        ([ReplicaState.UNKNOWN], Fault.NOT_READY),
        ([ReplicaState.UNREACHABLE, ReplicaState.UNREACHABLE], Fault.UNREACHABLE),
        ([ReplicaState.STUCK], Fault.SILENT),
        ([ReplicaState.STUCK, ReplicaState.UNREACHABLE], Fault.NOT_READY),
    ],
)
def test_a_request_that_finds_nobody_is_told_why(states: list[ReplicaState], fault: Fault) -> None:
    error = unable([report(state) for state in states])
    assert error.fault is fault
    assert error.to_gateway().status == 503
    assert error.to_gateway().retry_after_s
