"""`/tokenize` and `/detokenize` on the real Triton, beside what the OpenAI routes count."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess, wait_until
from wire.request import Tokenize, encode_request
from wire.strings import pack_strings

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")
TEXTS = ["", "你好", " The question\n👋 ", "<|user|> hi [gMASK]", "a" * 5000]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "Hello 👋"},
    {"role": "user", "content": "The question"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "北京的天气"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": "call_12345",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "北京"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_12345", "content": '{"t": 3}'},
]


@pytest.fixture
def http(up: UpProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=up.base_url, timeout=30) as client:
        yield client


def tokens(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def by_the_model(triton: StreamClient, model: str, text: str) -> list[int] | None:
    ((_, meta),) = triton.stream(model, text, tokenize="text")
    return meta.tokenized.ids


def refusal(http: httpx.Client, path: str, **body: Any) -> tuple[int, Any, Any]:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_goes_there_and_back(model: str, text: str, http: httpx.Client, triton: StreamClient) -> None:
    with_prefix = tokens(http, model=model, prompt=text)
    bare = tokens(http, model=model, prompt=text, add_special_tokens=False)
    assert with_prefix["count"] == len(with_prefix["tokens"])
    assert with_prefix["tokens"][2:] == bare["tokens"] == by_the_model(triton, model, text)
    for each in (with_prefix, bare):
        assert http.post("/detokenize", json={"model": model, "tokens": each["tokens"]}).json() == {
            "prompt": text
        }


@pytest.mark.parametrize("model", MODELS)
def test_counts_are_those_of_completions(model: str, http: httpx.Client, sdk: openai.OpenAI) -> None:
    for text in TEXTS[:4]:
        completion: Any = sdk.completions.create(
            model=model, prompt=text, max_tokens=1, extra_body={"return_token_ids": True}
        )
        counted = tokens(http, model=model, prompt=text)
        assert counted["tokens"] == completion.choices[0].prompt_token_ids
        assert counted["count"] == completion.usage.prompt_tokens


@pytest.mark.parametrize(
    ("model", "messages", "more"),
    [
        ("chatglm3", TALK, {}),
        ("chatglm2", TALK, {}),
        ("chatglm3", TALK, {"tools": TOOLS}),
        ("chatglm3", CALLED, {"tools": TOOLS}),
        *(
            ("chatglm3", CALLED, {"tools": TOOLS, "tool_choice": each})
            for each in ("none", "required", NAMED)
        ),
        *((model, TALK, {"response_format": {"type": "json_object"}}) for model in MODELS),
        ("chatglm3", TALK, {"tools": TOOLS, "response_format": {"type": "json_object"}}),
    ],
)
def test_counts_are_those_of_chats(
    model: str, messages: list[Any], more: dict[str, Any], http: httpx.Client, sdk: openai.OpenAI
) -> None:
    chat = sdk.chat.completions.create(
        model=model, messages=messages, max_tokens=3, extra_body={"return_token_ids": True}, **more
    )
    counted = tokens(http, model=model, messages=messages, **more)
    assert counted["count"] == chat.usage.prompt_tokens
    assert counted["tokens"] == chat.model_extra["prompt_token_ids"]
    card: Any = next(each for each in sdk.models.list() if each.id == model)
    assert counted["max_model_len"] == card.max_model_len
    before = tokens(http, model=model, messages=messages, add_generation_prompt=False, **more)
    assert before["tokens"] == counted["tokens"][: before["count"]]
    assert before["count"] < counted["count"]
    # The whole answer's ids, and the same streamed.
    assert len(chat.choices[0].model_extra["token_ids"]) == chat.usage.completion_tokens


def test_each_token_is_shown(http: httpx.Client) -> None:
    shown = tokens(http, model="chatglm3", messages=TALK[1:2], return_token_strs=True)
    assert len(shown["token_strs"]) == shown["count"]
    assert shown["token_strs"][:3] == ["[gMASK]", "sop", "<|user|>"]
    assert shown["token_strs"][-1] == "<|assistant|>"


def test_what_cannot_be_is_refused_by_name(http: httpx.Client) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert refusal(http, path, model="nobody", **body) == (404, "model", "model_not_found")
    assert refusal(http, "/detokenize", model="chatglm3", tokens=[5, 2**31]) == (400, "tokens", None)
    assert refusal(http, "/detokenize", model="chatglm3", tokens=[5, -1]) == (400, "tokens.1", None)
    assert refusal(http, "/tokenize", model="chatglm3") == (400, "prompt", None)
    assert refusal(http, "/tokenize", model="chatglm2", messages=TALK, tools=TOOLS) == (400, "tools", None)
    assert refusal(http, "/tokenize", model="chatglm2", messages=TALK[:3]) == (400, "messages.2", None)
    surrogate = http.post(
        "/tokenize",
        content=rb'{"model": "chatglm3", "prompt": "\ud800"}',
        headers={"content-type": "application/json"},
    )
    assert surrogate.status_code == 400


def test_ids_that_a_model_answered_with_are_its_own(http: httpx.Client, sdk: openai.OpenAI) -> None:
    answer: Any = sdk.completions.create(
        model="chatglm3",
        prompt="你好",
        max_tokens=100,
        temperature=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    ids = answer.choices[0].token_ids
    assert http.post("/detokenize", json={"model": "chatglm3", "tokens": ids}).status_code == 200


def test_a_million_tokens_are_returned_and_more_are_refused(http: httpx.Client) -> None:
    text = "a" * 1_000_000
    shown = tokens(http, model="chatglm3", prompt=text, add_special_tokens=False, return_token_strs=True)
    assert shown["count"] == len(shown["tokens"]) == len(shown["token_strs"]) > 100_000
    assert "".join(shown["token_strs"]).strip() == text
    refused = http.post("/tokenize", json={"model": "chatglm3", "prompt": "\U0001d800" * 1_000_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert refused.json()["error"]["message"].endswith("at most 1048576 are returned")
    assert refusal(http, "/detokenize", model="chatglm3", tokens=[7] * (2**20 + 1)) == (400, "tokens", None)


class Flood:
    """Long texts that nobody waits for, sent directly to the model, and what it refuses."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._calls: list[Any] = []
        self.refused: list[str] = []

    def rise(self, count: int, *, text: str = "a" * 400_000, deadline_ms: int | None = None) -> None:
        document = encode_request(Tokenize(tokenize="text", strings=True, deadline_ms=deadline_ms))
        request = service_pb2.ModelInferRequest(model_name="chatglm3")
        for name, value in (("prompt", text.encode()), ("history", b""), ("sampling", document)):
            request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(pack_strings([value]))
        for _ in range(count):
            self._calls.append(self._stub.ModelStreamInfer(iter([request])))
            threading.Thread(target=self._read, args=(self._calls[-1],), daemon=True).start()

    def ebb(self) -> None:
        for call in self._calls:
            call.cancel()

    def close(self) -> None:
        self.ebb()
        self._channel.close()

    def _read(self, call: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            self.refused.extend(message.error_message for message in call if message.error_message)


@pytest.fixture
def flood(up: UpProcess) -> Iterator[Flood]:
    flood = Flood(up.triton_grpc)
    yield flood
    flood.close()


def test_a_full_tokenizer_says_so_and_forgets_who_left(http: httpx.Client, flood: Flood) -> None:
    answers: list[httpx.Response] = []

    def refuses_while_full() -> bool:
        before = len(flood.refused)
        flood.rise(100)
        wait_until(lambda: len(flood.refused) > before)
        with contextlib.suppress(httpx.ReadTimeout):  # it may get the place of one that was just done
            answers.append(http.post("/tokenize", json={"model": "chatglm3", "prompt": "a"}, timeout=2))
        return bool(answers) and answers[-1].status_code != 200

    wait_until(refuses_while_full)
    full = answers[-1]
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json()["error"]["message"] == "The model's queue is full; try again shortly."
    assert all("tritongate:queue_full:" in each for each in flood.refused)
    flood.ebb()
    # Were they tokenized all the same, 64 of them would take half a minute.
    wait_until(lambda: http.post("/tokenize", json={"model": "chatglm3", "prompt": "a"}).status_code == 200)


def test_a_request_waits_for_the_tokenizer_no_longer_than_it_says(flood: Flood) -> None:
    def late() -> list[str]:
        return [each for each in flood.refused if "tritongate:deadline_exceeded:" in each]

    def refuses_what_is_late() -> bool:
        flood.rise(1)
        flood.rise(1, text="a", deadline_ms=1)
        return bool(late())

    wait_until(refuses_what_is_late)
