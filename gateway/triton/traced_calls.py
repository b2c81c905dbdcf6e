"""Traces the calls to Tritons that one request makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from gateway.generation import Generation
from gateway.tokenization import Tokenization
from gateway.tracing import Attribute, Part, current_trace
from gateway.triton.replicas import Replica
from gateway.triton.status import TritonError

R = TypeVar("R", Generation, Tokenization)

_NOWHERE = Part()


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
