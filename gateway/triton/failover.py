"""Failover: the replicas that one request tries in turn, until one answers or no other may be tried."""

import logging
from collections.abc import Callable, Sequence

from gateway.triton.health import ReplicaState, UpstreamObserver, unable
from gateway.triton.replicas import Replica
from gateway.triton.status import Fault, TritonError

_log = logging.getLogger(__name__)

_NO_FAULT_OF_UPSTREAM = {
    Fault.INVALID_REQUEST,
    Fault.INVALID_GRAMMAR,
    Fault.CONTEXT_LENGTH,
    Fault.TOO_LARGE,
    Fault.UNREAD,
    Fault.CLOSED,
}
"""Faults caused by the client or by the gateway itself."""

_LOGGED_LIMIT = 2000
"""How many characters of an upstream's error text are logged."""


class Tries:
    """The attempts of one request.

    Args:
        replicas: returns the model's current replicas; raises GatewayError if there cannot be any.
        request_id: for the log.
        limit: of the number of attempts.
        observer: told of failures.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        *,
        request_id: str,
        limit: int,
        observer: UpstreamObserver | None,
    ) -> None:
        self._replicas = replicas
        self._request_id = request_id
        self._limit = limit
        self._observer = observer
        self._count = 0
        self._newest: Replica | None = None
        self._tried: list[Replica] = []

    def next(self) -> Replica:
        """Choose a replica that has not failed yet.

        Raises:
            GatewayError: none is ready, or there cannot be any.
        """
        # Looked up for each attempt: the pool may have been closed meanwhile.
        replicas = self._replicas()
        replica = least_outstanding(self._untried(replicas))
        if replica is None:
            raise unable([each.describe() for each in replicas]).to_gateway()
        self._newest = replica
        self._count += 1
        return replica

    def failed(self, error: TritonError, *, delivered: bool = False) -> None:
        """Record that the latest attempt failed; return if another one may be made.

        Args:
            error: its failure.
            delivered: whether the client already has part of the answer, which cannot be taken back.

        Raises:
            GatewayError: it was the last attempt.
        """
        replica = self._newest
        if replica is not None:
            if error.fault not in _NO_FAULT_OF_UPSTREAM:
                self._note(replica, error)
            if not error.same_replica:
                self._tried.append(replica)
        another = self._count < self._limit and any(
            replica.state is ReplicaState.READY for replica in self._untried(self._replicas())
        )
        if delivered or not error.failover or not another:
            raise error.to_gateway() from error

    def _untried(self, replicas: Sequence[Replica]) -> list[Replica]:
        return [replica for replica in replicas if replica not in self._tried]

    def _note(self, replica: Replica, error: TritonError) -> None:
        if self._observer is not None:
            self._observer.upstream_error(replica.model, replica.upstream, error.fault.value)
        _log.warning(
            "upstream failed: %s",
            error.fault.value,
            extra={
                "request_id": self._request_id,
                "model": replica.model,
                "upstream": replica.upstream,
                "detail": error.detail[:_LOGGED_LIMIT],
            },
        )


def least_outstanding(replicas: Sequence[Replica]) -> Replica | None:
    """Return the ready replica with the fewest running generations; of equals, the least recently chosen."""
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    if not ready:
        return None
    chosen = min(ready, key=lambda replica: (replica.outstanding, replica.last_chosen))
    chosen.last_chosen = max(replica.last_chosen for replica in replicas) + 1
    return chosen
