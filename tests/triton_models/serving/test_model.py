"""What Triton calls, with stand-ins for Triton's own objects."""

import gc
import importlib
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import PB_UTILS, wait_until
from triton_models.serving import intake
from wire.meta import Meta, decode_meta
from wire.refusal import parse_refusal

LOADED = """
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("")
from triton_models.serving.model import TritonPythonModel
raise SystemExit("torch" in sys.modules or "google.protobuf" in sys.modules)
"""


def test_torch_is_not_loaded_to_complete_a_configuration() -> None:
    """It takes seconds, and some hundred megabytes."""
    done = subprocess.run([sys.executable, "-c", LOADED], check=False)
    assert done.returncode == 0


class ResponseSender:
    """Triton's, which outlives its request."""

    def __init__(self) -> None:
        self.metas: list[Meta] = []
        self.error: str | None = None

    def send(self, response: Any, *, flags: int) -> None:
        if response.error is not None:
            self.error = response.error.message
        else:
            self.metas.append(decode_meta(response.output_tensors[1][1][0, 0]))

    def is_cancelled(self) -> bool:
        return False


class Request:
    """Triton's, whose inputs lie in the memory shared with the server for as long as it is referred to."""

    def __init__(self, inputs: dict[str, list[bytes]], sender: ResponseSender) -> None:
        self.inputs = inputs
        self.sender = sender
        self.asked_for_trace = False

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def trace(self) -> Any:
        self.asked_for_trace = True
        return types.SimpleNamespace(get_context=lambda: self.inputs.get("context"))

    def parameters(self) -> str:
        return '{"traceparent":"forwarded"}'


def pb_utils() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        vars(PB_UTILS),
        get_input_tensor_by_name=lambda request, name: types.SimpleNamespace(
            as_numpy=lambda: np.array([request.inputs[name]], dtype=np.object_)
        ),
    )
    return module


@pytest.fixture
def model(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the model as Triton would have it after `initialize`."""
    utils = pb_utils()
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    module = importlib.import_module("triton_models.serving.model")
    model = module.TritonPythonModel()
    model._stub = types.SimpleNamespace(requested=lambda: None)
    model._read = lambda request: intake.read_arrival(request, pb_utils=utils, traced=False)
    model._service = served.service
    yield model
    del sys.modules["triton_models.serving.model"]


def inputs(sampling: bytes, prompt: bytes = b"") -> dict[str, list[bytes]]:
    return {"prompt": [prompt], "history": [b""], "sampling": [sampling]}


def test_nothing_refers_to_a_request_that_was_handed_over(model: Any) -> None:
    """Its inputs would fill the memory shared with Triton: 1 MiB prompts by 2,048 open requests.

    A request was once kept for as long as it was open, to ask it for its trace and whether it was cancelled.
    """
    gc.disable()  # nor in a cycle, which is only freed some time later
    try:
        for sampling in (b'{"max_tokens":40,"ignore_eos":true}', b"{", b'{"open_channel":"c"}'):
            sender = ResponseSender()
            request = Request(inputs(sampling, "你好".encode()), sender)
            left = weakref.ref(request)
            batch = [request]
            model.execute(batch)
            del request, batch
            assert left() is None
            wait_until(lambda sender=sender: bool(sender.metas or sender.error))
    finally:
        gc.enable()


def test_nothing_is_sent_from_execute(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that hangs there would hold up every request behind it; whatever is sent, the sender sends."""
    taken: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(model._service, "submit", taken.append)
        kinds = (b'{"probe":true}', b'{"cancel":"a"}', b"{", b"{}", b'{"detokenize":[]}')
        senders = [ResponseSender() for _ in kinds]
        requests = [Request(inputs(kind), sender) for kind, sender in zip(kinds, senders, strict=True)]
        requests.append(Request({}, ResponseSender()))
        model.execute(requests)
    assert not any(each.sender.metas or each.sender.error for each in requests)
    (batch,) = taken
    assert len(batch) == 6
    model._service.submit(batch)
    wait_until(lambda: all(each.sender.metas or each.sender.error for each in requests))


@pytest.mark.parametrize(
    "given", [{}, inputs(b"{}") | {"prompt": [b"a", b"b"]}, inputs(b"{}") | {"history": []}]
)
def test_inputs_that_are_not_one_string_each_are_refused_alone(model: Any, given: dict[str, Any]) -> None:
    broken, fine = Request(given, ResponseSender()), Request(inputs(b'{"probe":true}'), ResponseSender())
    model.execute([broken, fine])
    wait_until(lambda: bool(broken.sender.error and fine.sender.metas))
    assert parse_refusal(str(broken.sender.error)) is not None


def test_a_request_that_cannot_be_answered_fails_no_other(model: Any) -> None:
    """An exception out of `execute` would fail the whole batch."""

    class Lost(Request):
        def get_response_sender(self) -> ResponseSender:
            raise RuntimeError("no shared memory")

    probe = inputs(b'{"probe":true}')
    lost, fine = Lost(probe, ResponseSender()), Request(probe, ResponseSender())
    model.execute([lost, fine])
    wait_until(lambda: bool(fine.sender.metas))


@pytest.mark.parametrize(
    ("tritons", "used"),
    [
        ('{"traceparent":"a"}', '{"traceparent":"a"}'),
        ("", '{"traceparent":"forwarded"}'),
        (None, '{"traceparent":"forwarded"}'),
    ],
)
def test_a_trace_goes_on_below_tritons_span_or_below_its_callers(tritons: Any, used: str) -> None:
    request = Request(inputs(b"{}") | {"context": tritons}, ResponseSender())
    arrival = intake.read_arrival(request, pb_utils=pb_utils(), traced=True)
    assert arrival.responder.trace_context == used


def test_nothing_is_asked_about_a_trace_if_there_is_no_tracing() -> None:
    request = Request(inputs(b"{}"), ResponseSender())
    assert intake.read_arrival(request, pb_utils=pb_utils(), traced=False).responder.trace_context is None
    assert not request.asked_for_trace
