"""A ModelInferRequest as protobuf JSON to the gateway, as a LangChain LLM of the field sends it."""

import base64
import json
import struct
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.up_process import UpProcess, wait_until

pytestmark = pytest.mark.e2e

HELLO = "你好"
PREDICT = "/MutilBackendService/Predict"


def request(model: str, tensors: dict[str, str], shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    inputs = [
        {
            "name": name,
            "datatype": "BYTES",
            "shape": shape,
            "contents": {"bytes_contents": [base64.b64encode(text.encode()).decode()]},
        }
        for name, text in tensors.items()
    ]
    outputs = [{"name": "response"}, {"name": "history"}]
    return {"model_name": model, "inputs": inputs, "outputs": outputs}


class TritonLLM:
    """Shaped like the field's subclass of LangChain's `LLM`: fields, `_llm_type` and `_call`."""

    endpoint: str
    model_name = "chatglm3"
    temperature = 0.0
    max_token = 64
    history: str = ""
    shape: tuple[int, ...] = (1,)

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def _llm_type(self) -> str:
        return "chatglm-on-triton"

    def _call(self, prompt: str, stop: list[str] | None = None) -> str:
        tensors = {
            "prompt": prompt,
            "history": self.history,
            "temperature": str(self.temperature),
            "max_token": str(self.max_token),
        }
        answer = httpx.post(
            self.endpoint + PREDICT,
            headers={"Content-Type": "application/json"},
            content=json.dumps(request(self.model_name, tensors, self.shape)),
            timeout=100,
        )
        answer.raise_for_status()
        response, self.history = (strings(raw)[0] for raw in answer.json()["raw_output_contents"])
        return response


def strings(raw: str) -> list[str]:
    data = base64.b64decode(raw)
    found = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return found


@pytest.mark.parametrize("shape", [(1,), (-1,)])
def test_an_llm_of_the_field_says_what_the_openai_api_says(
    up: UpProcess, sdk: openai.OpenAI, shape: tuple[int, ...]
) -> None:
    messages: list[Any] = [{"role": "user", "content": HELLO}]
    llm = TritonLLM(endpoint=up.base_url, shape=shape)
    for prompt in (HELLO, "再说一次"):
        messages = [*messages[:-1], {"role": "user", "content": prompt}]
        completion = sdk.chat.completions.create(
            model="chatglm3", messages=messages, temperature=0, max_tokens=20
        )
        llm.max_token = completion.usage.prompt_tokens + 20  # that client counts the prompt too
        expected = completion.choices[0].message.content
        # What it returns is stripped, as the original `chat` did.
        assert llm._call(prompt) == expected.strip()
        spoken = [{"role": turn["role"], "content": turn["content"]} for turn in json.loads(llm.history)]
        assert [turn["content"] for turn in spoken[-2:]] == [prompt, expected.strip()]
        messages = [*spoken, {}]


def refusal(up: UpProcess, **changes: Any) -> tuple[int, Any, str]:
    tensors = {"prompt": HELLO, "history": "", "temperature": "0", "max_token": "20"} | changes
    model = tensors.pop("model", "chatglm3")
    given = {name: value for name, value in tensors.items() if value is not None}
    answer = httpx.post(up.base_url + PREDICT, json=request(model, given), timeout=100)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_refusals_have_the_gateways_shape(up: UpProcess) -> None:
    for model in ("chatglm3-stream", "chatglm3-tokenizer", "nope"):
        assert refusal(up, model=model)[:2] == (404, "model_name")
    assert refusal(up, surprise="x")[:2] == (400, "inputs.4.name")
    status, _, message = refusal(up, max_token=None)
    assert (status, "max_token" in message) == (400, True)
    for name, value in (("temperature", "warm"), ("max_token", "-1"), ("history", "[[")):
        status, _, message = refusal(up, **{name: value})
        assert (status, name in message) == (400, True)
        assert "Traceback" not in message


def test_a_client_that_gives_up_frees_the_engine(up: UpProcess) -> None:
    cancels = up.gauge("tritongate_client_cancels_total", model="chatglm3")
    body = request("chatglm3", {"prompt": HELLO, "history": "", "temperature": "1", "max_token": "500"})

    def give_up() -> None:
        for _ in range(20):  # an answer may end early by itself
            httpx.post(up.base_url + PREDICT, json=body, timeout=0.3)

    with pytest.raises(httpx.ReadTimeout):
        give_up()
    wait_until(lambda: up.gauge("tritongate_client_cancels_total", model="chatglm3") == cancels + 1)
    wait_until(lambda: up.gauge("tritongate_engine_requests_running", model="chatglm3") == 0)
