"""Legacy clients of Triton, as they are written in the field: HTTP with JSON, gRPC with tritonclient."""

import json
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as grpcclient

TIMEOUT_S = 100.0


class FieldError(Exception):
    """The answer was an error; `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def tensor(name: str, shape: list[int], data: list[Any], datatype: str = "BYTES") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def infer(url: str, inputs: list[dict[str, Any]], timeout_s: float = TIMEOUT_S) -> dict[str, list[Any]]:
    """POST an inference request and return each output's data by name."""
    body = {"inputs": inputs, "outputs": [{"name": "response"}, {"name": "history"}]}
    answer = httpx.post(url, json=body, timeout=timeout_s)
    if answer.status_code != httpx.codes.OK:
        raise FieldError(answer.status_code, answer.json()["error"])
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def ask_batched(
    url: str,
    prompt: str,
    history: str = "",
    *,
    temperature: str = "0",
    max_token: str = "40",  # noqa: S107 - a number of tokens
    nested: bool = False,
    model: str = "chatglm3",
    timeout_s: float = TIMEOUT_S,
) -> tuple[str, str]:
    """Contract 1: everything is a string of shape [1, 1]; returns response and history."""
    values = {"prompt": prompt, "history": history, "temperature": temperature, "max_token": max_token}
    inputs = [
        tensor(name, [1, 1], [[value]] if nested else [value])  # both are said in the field
        for name, value in values.items()
    ]
    outputs = infer(f"{url}/v2/models/{model}/infer", inputs, timeout_s)
    return outputs["response"][0], outputs["history"][0]


def ask_unbatched(
    url: str, prompt: str, history: str = "", *, temperature: str = "0", max_token: int = 40, rounds: int = 5
) -> tuple[str, str]:
    """Contract 2: shape [1], integers as INT16."""
    outputs = infer(
        url,
        [
            tensor("prompt", [1], [prompt]),
            tensor("history", [1], [history]),
            tensor("temperature", [1], [temperature]),
            tensor("max_token", [1], [max_token], "INT16"),
            tensor("history_len", [1], [rounds], "INT16"),
        ],
    )
    return outputs["response"][0], outputs["history"][0]


def ask_chatglm2(
    client: grpcclient.InferenceServerClient,
    prompt: str,
    history: list[str],
    *,
    temperature: str = "0",
    max_token: str = "500",  # noqa: S107 - a number of tokens
    rounds: str = "5",
    model: str = "chatglm2",
    timeout_s: float = TIMEOUT_S,
) -> tuple[str, list[str]]:
    """Contract 3: gRPC, history as a flat list of questions and answers."""
    values = {
        "prompt": [prompt],
        "history": history,
        "temperature": [temperature],
        "max_token": [max_token],
        "history_len": [rounds],
    }
    inputs = []
    for name, texts in values.items():
        data = np.array([text.encode() for text in texts], dtype=np.object_)
        one = grpcclient.InferInput(name, list(data.shape), "BYTES")
        one.set_data_from_numpy(data)
        inputs.append(one)
    result = client.infer(model, inputs, client_timeout=timeout_s)
    response = result.as_numpy("response")[0].decode()
    return response, [item.decode() for item in result.as_numpy("history")]


def conversation(history: str) -> list[tuple[str, str]]:
    """Return (role, content) of each item of a history that came back."""
    return [(item["role"], item["content"]) for item in json.loads(history)]
