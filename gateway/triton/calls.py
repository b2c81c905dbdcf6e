"""The call of one Triton as a part of its request's trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from gateway.generation import Generation
from gateway.prediction import Prediction
from gateway.tokenization import Tokenization
from gateway.tracing import Attribute, Part, current_trace
from gateway.triton.replicas import Replica
from gateway.triton.status import TritonError

R = TypeVar("R", Generation, Prediction, Tokenization)

_NOWHERE = Part()


@contextmanager
def call_of(replica: Replica, request: R) -> Iterator[tuple[Part, R]]:
    """Note that `replica` is called for the current task's request.

    Yields the call as a part of the trace, and the request with what takes the trace on to that Triton. A
    TritonError out of the block is how the call failed.
    """
    trace = current_trace.get()
    if trace is None:
        yield _NOWHERE, request
        return
    trace.upstreams.append(replica.upstream)
    attributes: dict[str, Attribute] = {
        "server.address": replica.upstream,
        "rpc.system": "grpc",
        "gen_ai.request.model": replica.model,
        "tritongate.attempt": len(trace.upstreams),
    }
    with trace.part("call", attributes) as part:
        try:
            yield part, replace(request, headers=part.headers) if part.headers else request
        except TritonError as error:
            part.fail(error.fault.value)
            raise
