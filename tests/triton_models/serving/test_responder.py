import types
from typing import Any

import numpy as np
import pytest

from triton_models.serving.responder import TritonResponder
from wire.channel import Frame, decode_frame
from wire.meta import Meta, decode_meta
from wire.refusal import RefusalCode, parse_refusal


class Request:
    """A request of Triton's, its response sender, and the outcome of sending."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[Any, int]] = []

    def get_response_sender(self) -> "Request":
        return self

    def send(self, response: Any, *, flags: int) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((response, flags))


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = range(4)

    def __init__(self, message: str, code: int) -> None:
        self.message = message
        self.code = code


PB_UTILS = types.SimpleNamespace(
    TritonError=TritonError,
    Tensor=lambda name, values: (name, values),
    InferenceResponse=types.SimpleNamespace,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)


@pytest.mark.parametrize("final", [False, True])
def test_a_response_holds_text_and_meta_as_one_row(final: bool) -> None:
    request = Request()
    TritonResponder(request, PB_UTILS).send("\N{SNOWMAN}", Meta(tokens=2), final=final)
    ((response, flags),) = request.sent
    text, meta = (values for _, values in response.output_tensors)
    assert [name for name, _ in response.output_tensors] == ["response", "meta"]
    assert text.shape == meta.shape == (1, 1)
    assert text.dtype == meta.dtype == np.object_
    assert text[0, 0].decode() == "\N{SNOWMAN}"
    assert decode_meta(meta[0, 0]) == Meta(tokens=2)
    assert flags == int(final)


def test_a_frame_is_the_meta_of_a_response_without_text() -> None:
    request = Request()
    TritonResponder(request, PB_UTILS).send_frame(Frame(frame=2, streams=[1], tokens=[1], texts=["a"]))
    ((response, flags),) = request.sent
    text, meta = (values for _, values in response.output_tensors)
    assert text[0, 0] == b""
    assert decode_frame(meta[0, 0]).texts == ["a"]
    assert flags == 0


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_is_a_final_error_with_a_status(code: RefusalCode) -> None:
    request = Request()
    TritonResponder(request, PB_UTILS).refuse(code, "why")
    ((response, flags),) = request.sent
    assert parse_refusal(response.error.message) == (code, "why")
    assert flags == 1


def test_a_refusal_that_cannot_be_sent_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The sender threads refuse what they could not send: an error out of that would end them for good."""
    TritonResponder(Request(RuntimeError("no shared memory")), PB_UTILS).refuse(RefusalCode.INTERNAL, "why")
    assert "could not be sent" in caplog.text


@pytest.mark.parametrize(
    ("tritons", "forwarded", "used"),
    [
        ('{"traceparent":"a"}', '{"traceparent":"b"}', '{"traceparent":"a"}'),
        ("", "{}", "{}"),
        (None, "{}", "{}"),
    ],
)
def test_a_trace_goes_on_below_tritons_span_or_below_its_callers(
    tritons: str | None, forwarded: str, used: str
) -> None:
    request = Request()
    request.trace = lambda: types.SimpleNamespace(get_context=lambda: tritons)
    request.parameters = lambda: forwarded
    assert TritonResponder(request, PB_UTILS).trace_context() == used
