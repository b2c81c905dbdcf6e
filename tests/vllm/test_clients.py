"""Clients of the real vLLM that leave, crowd in, or send what nobody can read."""

import asyncio
import json
import random
import time
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.up_process import wait_until
from tests.vllm.conftest import Served
from triton_models.vllm.metrics import PERIOD_S
from wire.strings import pack_strings

LONG: Any = {
    "model": "llama",
    "messages": [{"role": "user", "content": "and"}],
    "max_tokens": 1000,
    "extra_body": {"ignore_eos": True},
}


class Engine:
    """What the engine's own counts say since then. vLLM counts no aborts, but tokens and running requests."""

    def __init__(self, served: Served) -> None:
        self.served = served
        time.sleep(2 * PERIOD_S)  # what ended before is copied by then
        self.tokens, self.ended = self.now("generation_tokens_total"), served.finished("length")

    def now(self, name: str) -> float:
        return self.served.triton.gauge(f"vllm:{name}")

    def is_idle_again(self) -> bool:
        """Whether it has generated something, and nothing runs."""
        return self.now("generation_tokens_total") > self.tokens and self.now("num_requests_running") == 0

    def generated(self) -> float:
        """Return the tokens of requests that ended before their last one."""
        wait_until(self.is_idle_again)
        assert self.served.finished("length") == self.ended
        return self.now("generation_tokens_total") - self.tokens


async def test_a_client_that_leaves_its_stream_aborts(served: Served, sdk: openai.AsyncOpenAI) -> None:
    engine = await asyncio.to_thread(Engine, served)
    streams = [await sdk.chat.completions.create(**LONG, stream=True) for _ in range(3)]
    for stream in streams:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
    assert 3 <= await asyncio.to_thread(engine.generated) < 3 * LONG["max_tokens"]


async def test_a_client_that_leaves_before_its_answer_aborts(served: Served, sdk: openai.AsyncOpenAI) -> None:
    engine = await asyncio.to_thread(Engine, served)
    waiting = asyncio.create_task(sdk.chat.completions.create(**LONG))
    await asyncio.to_thread(wait_until, lambda: engine.now("generation_tokens_total") > engine.tokens)
    assert not waiting.done()
    waiting.cancel()
    assert 1 <= await asyncio.to_thread(engine.generated) < LONG["max_tokens"]


async def test_32_clients_get_what_is_theirs(served: Served, sdk: openai.AsyncOpenAI) -> None:
    ended = served.finished("length")

    async def ask(number: int) -> None:
        token = f"{number % 10}"
        asked: Any = {
            "model": "llama",
            "messages": [{"role": "user", "content": f"client {number}"}],
            "max_tokens": 20 + number,
            "logit_bias": {str(served.tokenizer.token_to_id(token)): 100},
            "temperature": 0,
        }
        for stream in (False, True):
            if stream:
                chunks = [chunk async for chunk in await sdk.chat.completions.create(**asked, stream=True)]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            else:
                text = (await sdk.chat.completions.create(**asked)).choices[0].message.content
            assert text == token * (20 + number)

    await asyncio.gather(*map(ask, range(32)))
    await asyncio.to_thread(wait_until, lambda: served.finished("length") == ended + 64)


def infer(served: Served, **tensors: Any) -> tuple[list[dict[str, Any]], str]:
    """Send tensors to Triton itself; return the responses' outputs, and the error's text."""
    request = service_pb2.ModelInferRequest(model_name="llama")
    for name, value in tensors.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], bool):
            kind, raw = "BOOL", np.array(values).tobytes()
        else:
            kind, raw = (
                "BYTES",
                pack_strings([each if isinstance(each, bytes) else each.encode() for each in values]),
            )
        request.inputs.add(name=name, datatype=kind, shape=[len(values)])
        request.raw_input_contents.append(raw)
    responses, error = [], ""
    with grpc.insecure_channel(served.triton.grpc) as channel:
        for message in service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([request]), timeout=100
        ):
            error = message.error_message
            if error:
                break
            if message.infer_response.outputs:
                named = zip(
                    message.infer_response.outputs, message.infer_response.raw_output_contents, strict=True
                )
                responses.append({tensor.name: raw for tensor, raw in named})
            if message.infer_response.parameters["triton_final_response"].bool_param:
                break
    return responses, error


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"sampling_parameters": "{"}, "not JSON"),
        ({"sampling_parameters": "[]"}, "not a JSON object"),
        ({"sampling_parameters": '{"no_such": 1}'}, "no_such"),
        ({"sampling_parameters": '{"temperature": "hot"}'}, "temperature"),
        ({"sampling_parameters": '{"top_p": 7}'}, "top_p"),
        ({"sampling_parameters": '{"lora_name": "none"}'}, "adapter"),
        ({"sampling_parameters": '{"structured_outputs": "{}"}'}, "structured_outputs"),
        ({"sampling_parameters": '{"output_kind": 0}'}, "output_kind"),
        ({"text_input": b"\xff\xfe"}, "UTF-8"),
        ({"image": ["!"]}, "base64"),
        ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({"embedding_request": '{"input": "x"}'}, "embeddings"),
    ],
)
async def test_a_bad_request_fails_alone_and_says_why(
    served: Served, sdk: openai.AsyncOpenAI, tensors: dict[str, Any], word: str
) -> None:
    beside = asyncio.create_task(sdk.chat.completions.create(**LONG | {"max_tokens": 50}))
    responses, error = await asyncio.to_thread(infer, served, **{"text_input": "the cat"} | tensors)
    assert not responses
    assert word in error
    assert "Traceback" not in error
    assert "File " not in error
    assert (await beside).choices[0].finish_reason == "length"


async def test_the_official_contract_without_a_gateway(served: Served) -> None:
    """The prompt comes first, and numbers may be text."""
    parameters = json.dumps({"max_tokens": "4", "temperature": "0", "ignore_eos": True})
    asked = {"text_input": "the cat", "sampling_parameters": parameters}
    (whole,), error = await asyncio.to_thread(infer, served, **asked)
    assert not error
    assert list(whole) == ["text_output"]
    assert whole["text_output"][4:].decode().startswith("the cat")
    reports = {f"return_{name}": True for name in ("finish_reason", "cumulative_logprob", "num_input_tokens",
                                                   "num_output_tokens")}  # fmt: skip
    responses, error = await asyncio.to_thread(infer, served, **asked, stream=True, **reports)
    assert not error
    assert b"the cat" + b"".join(each["text_output"][4:] for each in responses) == whole["text_output"][4:]
    assert responses[-1]["finish_reason"][4:] == b"length"
    assert {each["finish_reason"][4:] for each in responses[:-1]} <= {b"None"}
    assert sum(int.from_bytes(each["num_output_tokens"], "little") for each in responses) == 4


async def test_junk_over_http_ends_nothing(served: Served, sdk: openai.AsyncOpenAI) -> None:
    dice = random.Random(1)
    values: list[Any] = [None, -1, 10**30, "x" * 3000, [], {}, [None], "\x00", True, 1e308, ["a", 1]]
    names = ("messages", "max_tokens", "temperature", "stop", "n", "seed", "logit_bias", "top_k", "bad_words",
             "stop_token_ids", "allowed_token_ids", "guided_json", "guided_regex", "response_format",
             "min_tokens", "logprobs", "top_logprobs", "repetition_penalty")  # fmt: skip
    async with httpx.AsyncClient(base_url=served.gateway.base_url, timeout=100) as client:
        for _ in range(150):
            body: Any = {"model": "llama", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
            for name in dice.sample(names, 2):
                body[name] = dice.choice(values)
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400, 422), (body, response.text)
            assert "Traceback" not in response.text
    answer = await sdk.chat.completions.create(**LONG | {"max_tokens": 5})
    assert answer.choices[0].finish_reason == "length"
