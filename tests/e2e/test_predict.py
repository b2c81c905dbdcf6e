"""A ModelInferRequest as protobuf JSON to the gateway: what fails. For what works see tests/clients."""

import base64
from typing import Any

import httpx
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

HELLO = "你好"
PREDICT = "/MutilBackendService/Predict"


def request(model: str, tensors: dict[str, str]) -> dict[str, Any]:
    inputs = [
        {
            "name": name,
            "datatype": "BYTES",
            "shape": [1],
            "contents": {"bytes_contents": [base64.b64encode(text.encode()).decode()]},
        }
        for name, text in tensors.items()
    ]
    outputs = [{"name": "response"}, {"name": "history"}]
    return {"model_name": model, "inputs": inputs, "outputs": outputs}


def refusal(up: UpProcess, **changes: Any) -> tuple[int, Any, str]:
    tensors = {"prompt": HELLO, "history": "", "temperature": "0", "max_token": "20"} | changes
    model = tensors.pop("model", "chatglm3")
    given = {name: value for name, value in tensors.items() if value is not None}
    answer = httpx.post(up.base_url + PREDICT, json=request(model, given), timeout=100)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_refusals_have_the_gateways_shape(up: UpProcess) -> None:
    for model in ("chatglm3-stream", "nope"):
        assert refusal(up, model=model)[:2] == (404, "model_name")
    assert refusal(up, surprise="x")[:2] == (400, "inputs.4.name")
    status, _, message = refusal(up, max_token=None)
    assert (status, "max_token" in message) == (400, True)
    for name, value in (("temperature", "warm"), ("max_token", "-1"), ("history", "[[")):
        status, _, message = refusal(up, **{name: value})
        assert (status, name in message) == (400, True)
        assert "Traceback" not in message
