"""The attempts of one request, each on another replica, until one answers or no other may be tried.

They are calls in the trace of the HTTP request.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from msgspec.structs import replace

from gateway.generation import Generation
from gateway.tokenization import Tokenization
from gateway.tracing import Attribute, Part, current_trace
from gateway.triton.errors import Fault, TritonError
from gateway.triton.replicas import Replica, ReplicaState, UpstreamObserver, unable

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

R = TypeVar("R", Generation, Tokenization)

_NOWHERE = Part()


class Attempts:
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


class TracedCalls(Generic[R]):
    """Records the calls for one request in the trace of the current task's HTTP request.

    An HTTP request with several prompts has one of these per prompt.

    Args:
        request: to be sent to a Triton.
    """

    def __init__(self, request: R) -> None:
        self._request: R = request
        self._trace = current_trace.get()
        self._called: list[str] = []
        if self._trace is not None:
            self._trace.calls.append(self._called)

    @contextmanager
    def to(self, replica: Replica) -> Iterator[tuple[Part, R]]:
        """Record a call to `replica`.

        Yields the call's part of the trace, and the request with the headers that continue the trace there. A
        TritonError that leaves the block is recorded as the call's failure.
        """
        if self._trace is None:
            yield _NOWHERE, self._request
            return
        self._called.append(replica.upstream)
        attributes: dict[str, Attribute] = {
            "server.address": replica.upstream,
            "rpc.system": "grpc",
            "gen_ai.request.model": replica.model,
            "tritongate.attempt": len(self._called),
        }
        with self._trace.part("call", attributes) as part:
            try:
                yield part, replace(self._request, headers=part.headers) if part.headers else self._request
            except TritonError as error:
                part.fail(error.fault.value)
                raise
