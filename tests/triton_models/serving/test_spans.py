import json
from collections.abc import Callable, Iterator

import pytest

from tests.otlp_receiver import ERROR, Receiver
from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import FakeResponder, wait_until
from triton_models.serving.spans import ModelSpans

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CONTEXT = json.dumps({"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def spans(collector: Receiver) -> ModelSpans:
    return ModelSpans(collector.endpoint, "glm", 3)


def test_an_answer_and_the_phases_of_each_choice(
    serve: Callable[..., Served], spans: ModelSpans, collector: Receiver
) -> None:
    served = serve(spans=spans)
    answer = served.ask(
        responder=FakeResponder(trace_context=CONTEXT),
        max_tokens=8,
        n=2,
        temperature=0,
        ignore_eos=True,
        request_id="mine",
    )
    answer.wait()
    served.service.close()
    (request,) = collector.named("generate")
    assert (request.trace_id, request.parent_id, request.service) == (TRACE_ID, PARENT_ID, "tritongate-model")
    assert request.status == 0
    assert request.attributes == {
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "tritongate.request_id": "mine",
    }
    for choice in range(2):
        phases = [collector.named(name, tritongate__choice=choice) for name in ("queue", "prefill", "decode")]
        (queue,), (prefill,), (decode,) = phases
        assert {each.parent_id for each in (queue, prefill, decode)} == {request.span_id}
        assert request.start_ns <= queue.start_ns
        assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)
        assert decode.end_ns <= request.end_ns
        assert decode.attributes["gen_ai.usage.output_tokens"] == 8
        assert prefill.attributes["tritongate.cached_tokens"] == 0
    assert len(collector.spans) == 7


def test_what_nobody_traces_has_no_spans(
    serve: Callable[..., Served], spans: ModelSpans, collector: Receiver
) -> None:
    served = serve(spans=spans)
    for context in (None, "", "{}", json.dumps({"traceparent": "junk"})):
        served.ask(responder=FakeResponder(trace_context=context), max_tokens=2).wait()
    served.service.close()
    assert not collector.spans


def test_a_refusal_has_its_code(serve: Callable[..., Served], spans: ModelSpans, collector: Receiver) -> None:
    served = serve(spans=spans)
    refused = served.ask(responder=FakeResponder(trace_context=CONTEXT), max_tokens=10**6).wait()
    served.service.close()
    (request,) = collector.spans
    assert (request.name, request.status) == ("generate", ERROR)
    assert request.attributes["error.type"] == refused.refused[0].value


def test_a_cancel_in_decode_and_one_before_the_first_token(
    serve: Callable[..., Served], spans: ModelSpans, collector: Receiver
) -> None:
    served = serve(slow=True, max_running=1, spans=spans)
    running = FakeResponder(trace_context=CONTEXT)
    served.ask(responder=running, max_tokens=400, ignore_eos=True, streamed=True)
    wait_until(lambda: len(running.channel.deltas(0)) > 1)
    waiting = served.ask(responder=FakeResponder(trace_context=CONTEXT), max_tokens=400, ignore_eos=True)
    wait_until(lambda: bool(waiting.responses))
    for each in (waiting, running):
        each.gone = True
        each.wait()
    served.service.close()
    assert [span.attributes["error.type"] for span in collector.named("generate")] == ["cancelled"] * 2
    assert len(collector.named("decode")) == len(collector.named("no_token")) == 1
    (request,) = (
        span for span in collector.named("generate") if span.attributes["gen_ai.usage.output_tokens"]
    )
    assert request.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
