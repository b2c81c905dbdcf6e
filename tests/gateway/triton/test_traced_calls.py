from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from gateway.batch import together
from gateway.generation import Delta
from gateway.tracing import Attribute, Part, PassOn, Trace, current_trace
from tests.gateway.triton.fake_triton import generation, refusing, until

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

Serve = Callable[..., Any]


class Noting(Trace):
    """Keeps what a recording one would make spans of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def part(
        self, name: str, attributes: Mapping[str, Attribute] | None = None
    ) -> AbstractContextManager[Part]:
        return self._noted(name, dict(attributes or {}))

    @contextmanager
    def _noted(self, name: str, attributes: Any) -> Any:
        part = Part((("traceparent", f"call-{len(self.told)}"),))
        told = [name, attributes["server.address"], attributes["tritongate.attempt"]]
        part.event = part.fail = told.append
        self.told.append(told)
        yield part


@pytest.fixture
def trace() -> Iterator[Noting]:
    trace = Noting()
    token = current_trace.set(trace)
    yield trace
    current_trace.reset(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_traceparent_reaches_triton(triton: Any, serve: Serve, *, stream: bool) -> None:
    pool = await serve(triton)
    trace = PassOn().begin("POST", {"traceparent": TRACEPARENT, "tracestate": "a=1"})
    token = current_trace.set(trace)
    triton.metadata.clear()
    async for _ in pool.generate(generation(stream=stream)):
        pass
    current_trace.reset(token)
    sent = [each for each in triton.metadata if "traceparent" in each]  # not the probes
    assert [(each["traceparent"], each["tracestate"]) for each in sent] == [(TRACEPARENT, "a=1")]
    assert trace.calls == [[triton.address]]


async def test_each_triton_that_is_tried_is_a_call(tritons: Any, serve: Serve, trace: Noting) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = refusing("tritongate:shutting_down: the model is being unloaded")
    for triton in (first, second):
        triton.metadata.clear()
    while len(trace.told) < 2:  # which of the two is first is left to chance
        trace.told.clear()
        trace.calls.clear()
        events = [event async for event in pool.generate(generation())]
        assert isinstance(events[-1], Delta)
        await until(lambda: pool.model("m").ready)
    assert trace.told == [
        ["call", first.address, 1, "not_ready"],
        ["call", second.address, 2, "accepted", "first_token"],
    ]
    assert trace.calls == [[first.address, second.address]]
    assert [each["traceparent"] for each in second.metadata if "traceparent" in each][-1] == "call-1"


async def test_the_tries_of_each_prompt_are_counted_by_themselves(
    triton: Any, serve: Serve, trace: Noting
) -> None:
    pool = await serve(triton)
    prompts = [generation(request_id=each) for each in "abc"]
    events = [event async for event in together(pool.generate, prompts)]
    assert isinstance(events[-1], Delta)
    assert [attempt for _, _, attempt, *_ in trace.told] == [1, 1, 1]
    assert trace.calls == [[triton.address]] * 3


async def test_what_is_asked_outside_of_a_request_has_no_trace(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    async for _ in pool.generate(generation()):
        pass
    assert not [each for each in triton.metadata if "traceparent" in each]
