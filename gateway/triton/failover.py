"""Which replicas one request goes to, one after the other, until one answers it or none may be asked."""

import logging
from collections.abc import Callable, Sequence

from gateway.triton.replicas import Replica, ReplicaState, UpstreamObserver, least_outstanding, unable
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
"""The client's doing, or our own."""

_LOGGED_LIMIT = 2000
"""Longest part of an upstream's error text, in characters, that is logged."""


class Tries:
    """The tries of one request.

    Args:
        replicas: returns those of the model at each moment; raises GatewayError when there can be none.
        request_id: for the log.
        limit: how many there may be.
        observer: hears of failures.
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
        """Choose one that did not fail yet.

        Raises:
            GatewayError: none is able, or there can be none.
        """
        # Looked up anew for each try: the pool may have been closed meanwhile.
        replicas = self._replicas()
        replica = least_outstanding(self._untried(replicas))
        if replica is None:
            raise unable(replicas).to_gateway()
        self._newest = replica
        self._count += 1
        return replica

    def failed(self, error: TritonError, *, delivered: bool = False) -> None:
        """Take note that the newest try failed, for metrics and the log; return if another one may be made.

        Args:
            error: why.
            delivered: whether the client has a part of the answer, which cannot be taken back.

        Raises:
            GatewayError: it was the last.
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
