"""One trace through gateway, Triton and model, read by a collector of our own."""

import contextlib
import re
import subprocess

import httpx
import pytest

from tests.e2e.up_process import UpProcess, wait_until
from tests.otlp_receiver import ERROR, Receiver, Span

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PARENT_ID = "00f067aa0ba902b7"
HELLO = [{"role": "user", "content": "你好"}]
SETTLED_S = 10.0
TRIES = 5
TOLD = {"POST /v1/chat/completions", "admission", "call", "generate"}
"""The gateway's own, and the model's, whatever becomes of the request."""
ALL = TOLD | {"InferRequest", "chatglm3", "compute", "queue", "prefill", "decode"}


def chat(traced: UpProcess, trace_id: str | None, **parameters: object) -> httpx.Response:
    # Without chance: an answer that ends with its first token has no `decode` and no `first_token`.
    body = {"model": "chatglm3", "messages": HELLO, "temperature": 0, "ignore_eos": True, **parameters}
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"} if trace_id else {}
    return httpx.post(traced.base_url + "/v1/chat/completions", json=body, headers=headers, timeout=60)


def settled(collector: Receiver, expected: dict[str, set[str]]) -> bool:
    """Wait until each trace has its spans, given by their names; False if one does not come to them.

    Triton (2.51) now and then makes no span for a request; whoever asks asks again.
    """

    def complete() -> bool:
        return all(names <= {span.name for span in collector.trace(each)} for each, names in expected.items())

    with contextlib.suppress(AssertionError):
        wait_until(complete, SETTLED_S)
        return True
    return False


def tree(spans: list[Span], parent_id: str) -> dict[str, object]:
    return {
        f"{span.service}: {span.name}": tree(spans, span.span_id)
        for span in sorted(spans, key=lambda span: span.start_ns)
        if span.parent_id == parent_id
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_trace(traced: UpProcess, collector: Receiver, *, stream: bool) -> None:
    for number in range(TRIES):
        trace_id = f"{0xA00 + 2 * number + stream:032x}"
        assert chat(traced, trace_id, stream=stream, max_tokens=12).status_code == 200
        if settled(collector, {trace_id: ALL}):
            break
    spans = collector.trace(trace_id)
    assert tree(spans, PARENT_ID) == {
        "tritongate: POST /v1/chat/completions": {
            "tritongate: admission": {},
            "tritongate: call": {
                "triton: InferRequest": {
                    "triton: chatglm3": {
                        "triton: compute": {},
                        "tritongate-model: generate": {
                            "tritongate-model: queue": {},
                            "tritongate-model: prefill": {},
                            "tritongate-model: decode": {},
                        },
                    }
                }
            },
        }
    }
    assert len(spans) == 10
    assert all(span.status != ERROR for span in spans)
    (call,) = [span for span in spans if span.name == "call"]
    assert call.events == ["accepted", "first_token"]
    (decode,) = [span for span in spans if span.name == "decode"]
    assert 1 <= decode.attributes["gen_ai.usage.output_tokens"] <= 12
    (request,) = [span for span in spans if span.name.startswith("POST")]
    (told,) = [span for span in spans if span.name == "generate"]
    assert told.attributes["tritongate.request_id"] == request.attributes["tritongate.request_id"]


def test_a_hang_up_and_a_refusal_have_their_status(traced: UpProcess, collector: Receiver) -> None:
    for number in range(TRIES):
        gone, refused = f"{0xB00 + 2 * number:032x}", f"{0xB01 + 2 * number:032x}"
        if not hang_up(traced, gone):
            continue
        assert chat(traced, refused, max_tokens=10**6).status_code == 400
        if settled(collector, {gone: ALL, refused: TOLD}):
            break

    def named(trace_id: str, name: str) -> Span:
        (span,) = [span for span in collector.trace(trace_id) if span.name == name]
        return span

    request = named(gone, "POST /v1/chat/completions")
    assert request.attributes["http.response.status_code"] == 499
    assert named(gone, "call").attributes["error.type"] == "cancelled"
    assert named(gone, "generate").attributes["error.type"] == "cancelled"
    request = named(refused, "POST /v1/chat/completions")
    assert (request.attributes["http.response.status_code"], request.status) == (400, 0)
    assert named(refused, "call").attributes["error.type"] == "context_length_exceeded"
    assert named(refused, "generate").attributes["error.type"] == "context_length_exceeded"


def hang_up(traced: UpProcess, trace_id: str) -> bool:
    """Leave in the middle of an answer; return whether the engine says that this came before its end."""

    def cancelled() -> float:
        return traced.gauge("tritongate_engine_requests_total", finish_reason="cancelled")

    body = '{"model":"chatglm3","stream":true,"ignore_eos":true,"temperature":0,"max_tokens":400,'
    body += '"messages":[{"role":"user","content":"x"}]}'
    before = cancelled()
    command = [
        "curl",
        "-sN",
        traced.base_url + "/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
    ]
    command += ["-H", f"traceparent: 00-{trace_id}-{PARENT_ID}-01", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        # The first event says only that it was accepted; with text it has got as far as `decode`.
        while not re.search(rb'"content": ?"[^"]', line := client.stdout.readline()):
            assert line.startswith(b"data:") or not line.strip()
            assert client.poll() is None
        client.kill()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: cancelled() > before, SETTLED_S)
        return True
    return False


def test_what_is_not_recorded_is_not_recorded_anywhere(traced: UpProcess, collector: Receiver) -> None:
    before = {span.trace_id for span in collector.spans}
    assert chat(traced, None, max_tokens=2).status_code == 200
    marker = f"{0xC0:032x}"
    assert chat(traced, marker, max_tokens=2).status_code == 200
    assert settled(collector, {marker: TOLD})
    assert {span.trace_id for span in collector.spans} == {*before, marker}
