"""What the official SDKs offer around a request, Python's and Node's, on the real Triton."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

MODEL = "chatglm3-demo"
QUESTION: list[Any] = [{"role": "user", "content": "襄阳今天天气怎么样？"}]
HELLO: list[Any] = [{"role": "user", "content": "你好"}]
NODE_SDK = "openai@6.49.0"
NODE_AT_LEAST = 20
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
STRICT: list[Any] = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]


class Word(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    word: str = pydantic.Field(max_length=5)


def test_the_stream_helper_tells_of_content_and_ends_with_the_answer(demo: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0}
    whole = demo.chat.completions.create(**asked, logprobs=True).choices[0]
    with demo.chat.completions.stream(**asked, logprobs=True) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == final.choices[0].message.content == whole.message.content
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.content == whole.message.content
    (logprobs,) = [event for event in events if event.type == "logprobs.content.done"]
    assert [each.token for each in logprobs.content] == [each.token for each in whole.logprobs.content]


def test_the_stream_helper_tells_of_calls(demo: openai.OpenAI) -> None:
    with demo.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0, tools=STRICT) as stream:
        events = list(stream)
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("get_weather", {"city": "襄阳"})
    pieces = [event.arguments_delta for event in events if event.type.endswith("arguments.delta")]
    assert "".join(pieces) == done.arguments == call.function.arguments
    assert call.function.parsed_arguments == {"city": "襄阳"}


def test_parse_gives_objects_whole_and_streamed(demo: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 3, "response_format": Word}
    parsed = demo.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Word)
    with demo.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_raw_and_streamed_responses_have_our_headers(demo: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
    headers = {"X-Request-Id": "mine-1"}
    raw = demo.chat.completions.with_raw_response.create(**asked, extra_headers=headers)
    assert raw.headers["X-Request-Id"] == "mine-1"
    assert raw.parse().id.startswith("chatcmpl-")
    with demo.chat.completions.with_streaming_response.create(**asked, stream=True) as streamed:
        assert streamed.headers["Content-Type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_the_models_page_and_one_model(demo: openai.OpenAI) -> None:
    page = demo.models.list()
    assert [model.id for model in page] == [MODEL]
    assert demo.models.retrieve(MODEL) == page.data[0]


async def test_the_async_client_does_many_at_once(demo: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=str(demo.base_url), api_key="unused", max_retries=0) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        whole = await client.chat.completions.create(**asked)
        texts = await asyncio.gather(*(streamed() for _ in range(8)))
        assert set(texts) == {whole.choices[0].message.content}
        async with client.chat.completions.stream(**asked) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == texts[0]
        assert (await client.models.retrieve(MODEL)).id == MODEL


NODE_PROGRAM = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const { hello, question, tools, model } = JSON.parse(process.env.ASKED);
const whole = await client.chat.completions.create({ model, messages: hello, temperature: 0 });
let text = "", chunks = 0, usage = null;
const streamed = await client.chat.completions.create({
  model, messages: hello, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of streamed) {
  chunks += 1;
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const runner = client.chat.completions.stream({ model, messages: question, temperature: 0, tools });
const called = await runner.finalChatCompletion();
const response = await client.responses.create({ model, input: hello, temperature: 0 });
const models = [];
for await (const each of client.models.list()) models.push(each.id);
let refused = null;
try {
  await client.chat.completions.create({ model, messages: hello, temperature: 3 });
} catch (error) {
  refused = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, wholeUsage: whole.usage, text, chunks, usage,
  call: called.choices[0].message.tool_calls[0].function, reason: called.choices[0].finish_reason,
  response: response.output_text, models, refused,
}));
"""


@pytest.fixture(scope="module")
def node_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds the official SDK."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not (node and npm):
        pytest.skip("Node's SDK is left out: node and npm are not installed here")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < NODE_AT_LEAST:
        pytest.skip(f"Node's SDK is left out: it needs Node {NODE_AT_LEAST}, and here is {version.strip()}")
    folder = tmp_path_factory.mktemp("node")
    command = [
        npm,
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix",
        str(folder),
        NODE_SDK,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return folder


def test_nodes_sdk_asks_whole_streamed_and_with_tools(node_sdk: Path, demo: openai.OpenAI) -> None:
    (node_sdk / "ask.mjs").write_text(NODE_PROGRAM, encoding="utf-8")
    asked = {"hello": HELLO, "question": QUESTION, "tools": TOOLS, "model": MODEL}
    done = subprocess.run(
        ["node", "ask.mjs"],
        cwd=node_sdk,
        env={**os.environ, "BASE_URL": str(demo.base_url), "ASKED": json.dumps(asked)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    whole = demo.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    assert said["whole"] == said["text"] == said["response"] == whole.choices[0].message.content
    assert said["chunks"] > 2
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert said["usage"][name] == said["wholeUsage"][name] == getattr(whole.usage, name)
    assert (said["call"]["name"], json.loads(said["call"]["arguments"])) == ("get_weather", {"city": "襄阳"})
    assert said["reason"] == "tool_calls"
    assert said["models"] == [MODEL]
    assert said["refused"] == ["BadRequestError", 400, "temperature"]


def test_curl_gets_each_piece_when_it_is_made(up: UpProcess) -> None:
    """`curl -N`, read as it comes: the first piece is there long before the last."""
    body = json.dumps(
        {"model": "chatglm3", "messages": HELLO, "stream": True, "max_tokens": 300, "ignore_eos": True}
    )
    url = up.base_url + "/v1/chat/completions"
    command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout
        first = curl.stdout.readline()
        assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        still_running = curl.poll() is None
        rest = curl.stdout.read()
    assert still_running
    assert rest.endswith("data: [DONE]\n\n")
    assert curl.returncode == 0
