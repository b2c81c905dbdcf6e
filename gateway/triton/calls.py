"""The calls of Tritons for one request to them, as parts of a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from gateway.generation import Generation
from gateway.prediction import Prediction
from gateway.tokenization import Tokenization
from gateway.tracing import Attribute, Part, current_trace
from gateway.triton.replicas import Replica
from gateway.triton.status import TritonError

R = TypeVar("R", Generation, Prediction, Tokenization)

_NOWHERE = Part()


class Calls(Generic[R]):
    """Notes them for the current task's HTTP request, which may be of several: one for each of its prompts.

    Args:
        request: what the Tritons are asked.
    """

    def __init__(self, request: R) -> None:
        self._request: R = request
        self._trace = current_trace.get()
        self._called: list[str] = []
        if self._trace is not None:
            self._trace.calls.append(self._called)

    @contextmanager
    def to(self, replica: Replica) -> Iterator[tuple[Part, R]]:
        """Note that `replica` is called.

        Yields the call as a part of the trace, and the request with what takes the trace on to that Triton. A
        TritonError out of the block is how the call failed.
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
