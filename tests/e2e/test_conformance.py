"""One client script against a model of each dialect: what it asks for works, or is refused by name.

The outcome is the table in `docs/dialects.md`. With `WRITE_DOCS=1` in the environment the test writes it.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.triton.dialects import _FOREIGN, DIALECTS
from tests.e2e.foreign_server import INPUTS, Foreign
from tests.e2e.up_process import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DOCS = Path(__file__).parents[2] / "docs"
MODELS = {
    "chatglm": "ChatGLM",
    "vllm": "vLLM",
    "llmapi": "LLM API",
    "ensemble": "`ensemble`",
    "bls": "`tensorrt_llm_bls`",
    "inner": "`tensorrt_llm`",
}
"""The headings of the table's columns."""
MARKER = "<!-- written by tests/e2e/test_conformance.py -->\n"
TEXT = "one two three four"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
STRICT = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False, "required": []},
        },
    }
]


class RefusedError(Exception):
    """A 400 that names the parameter."""


class Client:
    """Asks one model."""

    def __init__(self, foreign: Foreign, http: httpx.AsyncClient, model: str) -> None:
        self.foreign = foreign
        self.model = model
        self._http = http

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer's document, or its chunks."""
        response = await self._http.post(path, json={"model": self.model, **body})
        if response.status_code == 400:
            raise RefusedError(response.json()["error"]["param"])
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        events = [
            line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data")
        ]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert not any("error" in chunk for chunk in chunks), chunks
        return chunks

    async def chat(self, said: str = TEXT, **more: Any) -> Any:
        messages = [{"role": "user", "content": f"SAY:{said}"}]
        return await self.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 60, "temperature": 0, **more}
        )

    async def complete(self, prompt: Any = f"SAY:{TEXT}", **more: Any) -> Any:
        return await self.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 60, "temperature": 0, **more}
        )

    async def text(self, **more: Any) -> tuple[str, str]:
        """Return an answer's text and finish reason."""
        choice = (await self.chat(**more))["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]


Check = Callable[[Client], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """One thing that clients ask for."""

    english: str
    chinese: str
    check: Check
    params: frozenset[str] = field(default_factory=frozenset)
    """What a refusal may name; empty: every model can do it."""


ROWS: list[Row] = []


def row(english: str, chinese: str, *params: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        ROWS.append(Row(english, chinese, check, frozenset(params)))
        return check

    return add


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


@row("an answer at once, streamed, and as a response", "完整回答、流式回答、Responses")
async def whole_and_streamed(client: Client) -> None:
    text, reason = await client.text()
    assert text
    assert reason in ("stop", "length")
    chunks = await client.chat(stream=True)
    assert content(chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    body = {"input": f"SAY:{TEXT}", "max_output_tokens": 60, "temperature": 0}
    response = await client.post("/v1/responses", body)
    assert response["output"][0]["content"][0]["text"] == text


@row("`usage`, the same either way", "`usage`，两种方式一致")
async def usage(client: Client) -> None:
    counted = (await client.chat())["usage"]
    assert counted["prompt_tokens"] > 0
    assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]
    chunks = await client.chat(stream=True, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] | counted == chunks[-1]["usage"]


@row("`max_tokens` and the reason `length`", "`max_tokens` 与结束原因 `length`")
async def limit(client: Client) -> None:
    answer = await client.chat(max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] in (2, 6)  # played tokens have 3 letters, the tokenizer's one
    chunks = await client.chat(max_tokens=2, stream=True)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@row("`stop`, cut from the text", "`stop`，从文本中截去")
async def stop(client: Client) -> None:
    text, _ = await client.text()
    wanted = text[len(text) // 2 :][:2]
    expected = text[: text.index(wanted)]
    assert await client.text(stop=[wanted]) == (expected, "stop")
    chunks = await client.chat(stop=[wanted], stream=True)
    assert content(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@row("`include_stop_str_in_output`", "`include_stop_str_in_output`", "include_stop_str_in_output")
async def include_stop(client: Client) -> None:
    text, _ = await client.text()
    wanted = text[len(text) // 2 :][:3]
    shown, _ = await client.text(stop=[wanted], include_stop_str_in_output=True)
    assert shown == text[: text.index(wanted)] + wanted


@row("a hang-up reaches the engine", "断开连接会传到引擎")
async def hang_up(client: Client) -> None:
    if client.model == "chatglm":

        def cancels() -> bool:
            return (
                client.foreign.server.gauge("tritongate_engine_requests_total", finish_reason="cancelled") > 0
            )

        more: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400}
    else:
        cancels = client.foreign.cancelled(client.model).exists
        more = {"max_tokens": 100_000}
    client.foreign.cancelled(client.model).unlink(missing_ok=True)
    said = "x" * (3 if client.model == "chatglm" else 6_000)
    body = {"model": client.model, "prompt": f"SAY:{said}", "stream": True, **more}
    url = client.foreign.gateway.base_url + "/v1/completions"
    for _ in range(60):
        async with httpx.AsyncClient(timeout=60) as http, http.stream("POST", url, json=body) as response:
            async for _ in response.aiter_lines():
                break
        for _ in range(20):  # or else the answer was over first
            if await asyncio.to_thread(cancels):
                return
            await asyncio.sleep(0.1)
    raise AssertionError("the engine never heard of it")


@row("`n`", "`n`", "n")
async def choices(client: Client) -> None:
    answer = await client.chat(n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


@row("`n`, streamed", "流式 `n`", "n")
async def streamed_choices(client: Client) -> None:
    chunks = await client.chat(n=2, stream=True, stream_options={"include_usage": True})
    assert content(chunks, 0)
    assert content(chunks, 1)
    once = (await client.chat())["usage"]
    assert chunks[-1]["usage"]["prompt_tokens"] == once["prompt_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * once["completion_tokens"]


@row("`logprobs`", "`logprobs`", "logprobs")
async def logprobs(client: Client) -> None:
    (choice,) = (await client.chat(logprobs=True))["choices"]
    tokens = choice["logprobs"]["content"]
    if client.model != "chatglm":  # which writes pieces of characters, too
        assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    chunks = await client.chat(logprobs=True, stream=True)
    parts = [chunk["choices"][0]["logprobs"] or {} for chunk in chunks if chunk["choices"]]
    streamed = [token for part in parts for token in part.get("content") or ()]
    assert [token["token"] for token in streamed] == [token["token"] for token in tokens]
    values = [[token["logprob"] for token in each] for each in (streamed, tokens)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert min(values[0]) < 0


@row("`top_logprobs`", "`top_logprobs`", "logprobs", "top_logprobs")
async def top_logprobs(client: Client) -> None:
    answer = await client.chat(logprobs=True, top_logprobs=2)
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


@row("`prompt_logprobs`", "`prompt_logprobs`", "prompt_logprobs")
async def prompt_logprobs(client: Client) -> None:
    assert (await client.chat(prompt_logprobs=1))["prompt_logprobs"]


@row("`echo`", "`echo`", "echo")
async def echo(client: Client) -> None:
    answer = await client.complete(echo=True)
    assert answer["choices"][0]["text"].startswith(f"SAY:{TEXT}")


@row("a prompt of token ids", "token id 形式的 prompt", "prompt")
async def ids_in(client: Client) -> None:
    ids = (await client.post("/tokenize", {"prompt": f"SAY:{TEXT}"}))["tokens"]
    assert (await client.complete(ids))["choices"][0]["text"]


@row("`return_token_ids`", "`return_token_ids`", "return_token_ids")
async def ids_out(client: Client) -> None:
    answer = await client.complete(return_token_ids=True)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]


@row("`/tokenize`, `/detokenize`", "`/tokenize`、`/detokenize`")
async def tokenized(client: Client) -> None:
    ids = (await client.post("/tokenize", {"prompt": TEXT}))["tokens"]
    assert (await client.post("/detokenize", {"tokens": ids}))["prompt"].strip() == TEXT


IMAGE = "iVBORw0KGgo="


def given_image(text: str) -> bool:
    """Whether the model told of the image: vLLM gets the file, the LLM API a URL of it."""
    shown = json.loads(text)
    return [IMAGE] in (shown.get("image"), [url.rpartition(",")[2] for url in shown.get("image_url", ())])


@row("images in messages", "消息中的图像", "messages.0.content.1")
async def images(client: Client) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}", "detail": "low"}}
    content = [{"type": "text", "text": "What is it? "}, image, {"type": "text", "text": " SAY:?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4000}
    answer = await client.post("/v1/chat/completions", asked)
    assert given_image(answer["choices"][0]["message"]["content"])
    given = [{"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}]
    given += [{"type": "input_text", "text": "SAY:?"}]
    body = {"input": [{"role": "user", "content": given}], "max_output_tokens": 4000}
    response = await client.post("/v1/responses", body)
    assert given_image(response["output"][0]["content"][0]["text"])


@row("tools that the model may call", "模型可以调用的工具", "tools")
async def tools(client: Client) -> None:
    said = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    answer = await client.chat(said, tools=TOOLS, max_tokens=100)
    if client.model != "chatglm":
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


@row("`parallel_tool_calls: false`", "`parallel_tool_calls: false`")
async def single_call(client: Client) -> None:
    if client.model == "chatglm":
        await client.chat(tools=TOOLS, parallel_tool_calls=False)
        return
    said = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>' * 2 + "x" * 3_000
    asked: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 10_000}
    answer = await client.chat(said, **asked)
    (choice,) = answer["choices"]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
    noted = client.foreign.cancelled(client.model)
    noted.unlink(missing_ok=True)
    chunks = await client.chat(said, **asked, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert {part["index"] for delta in deltas for part in delta.get("tool_calls") or ()} == {0}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    await asyncio.to_thread(wait_until, noted.exists)


@row("a tool that it must call (`tool_choice`)", "必须调用的工具（`tool_choice`）", "tool_choice")
async def forced_tool(client: Client) -> None:
    asked: dict[str, Any] = {"tools": STRICT, "tool_choice": "required", "max_tokens": 4000}
    if client.model == "chatglm":
        asked["max_tokens"] = 200
    answer = await client.chat('[{"name": "weather", "arguments": {}}]', **asked)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": "{}"}
    if client.model != "chatglm":
        assert "minItems" in (await client.text(said="?", **asked))[0]


@row("tools with `strict`", "`strict` 工具", "tools")
async def strict_tool(client: Client) -> None:
    await client.chat(tools=STRICT)
    if client.model != "chatglm":
        asked = {"said": "?", "tools": STRICT, "max_tokens": 4000}
        assert "structural_tag" in (await client.text(**asked))[0]


@row(
    "`response_format`",
    "`response_format`",
    "response_format",
    "response_format.json_schema.schema",
)
async def response_format(client: Client) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for each in (asked, {"type": "json_object"}):
        text, reason = await client.text(said='{"a": 1}', response_format=each, max_tokens=200)
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
    if client.model != "chatglm":
        assert "enum" in (await client.text(said="?", response_format=asked, max_tokens=4000))[0]


GRAMMARS: dict[str, Any] = {
    "regex": "qux|foo",
    "choice": ["qux", "foo"],
    "grammar": 'start: "qux"',
}
for kind, value in GRAMMARS.items():

    @row(f"`structured_outputs.{kind}`", f"`structured_outputs.{kind}`", f"structured_outputs.{kind}")
    async def structured(client: Client, asked: dict[str, Any] = {kind: value}) -> None:  # noqa: B006 - the loop's
        said = "qux" if client.model == "chatglm" else "?"
        text, _ = await client.text(
            said=said, structured_outputs=asked, max_tokens=4000 if said == "?" else 60
        )
        assert "qux" in text or "foo" in text


PARAMETERS: dict[str, Any] = {
    "temperature": 0.75,
    "top_p": 0.625,
    "top_k": 37,
    "min_p": 0.375,
    "seed": 7331,
    "presence_penalty": 0.875,
    "frequency_penalty": 1.125,
    "repetition_penalty": 1.375,
    "min_tokens": 31,
    "ignore_eos": True,
    "logit_bias": {"4711": 3.5},
    "allowed_token_ids": [4711],
    "bad_words": ["qux"],
    "stop_token_ids": [4711],
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 37,
    "priority": 3,
}
TOLD: dict[str, dict[str, str]] = {
    "bad_words": {"inner": "81, 85, 88"},
    "ignore_eos": dict.fromkeys(("ensemble", "bls", "inner"), '"end_id": [-1]')
    | {"": '"ignore_eos\\": true'},
    "truncate_prompt_tokens": {"inner": ""},
    "skip_special_tokens": {"inner": "", "": '"skip_special_tokens\\": false'},
    "logit_bias": {"": "4711"},
    "priority": {"": ""},
}
"""How a parameter reads among what a model was given, if not as in the request.

Priorities go nowhere, and what is shown of special tokens is up to the gateway where it reads ids.
"""
SMALL = {"logit_bias": {"65": 3.5}, "allowed_token_ids": [65], "stop_token_ids": [65]}
"""Ids that our own small model has."""

for name, value in PARAMETERS.items():

    @row(f"`{name}`", f"`{name}`", name)
    async def parameter(client: Client, name: str = name, value: Any = value) -> None:
        if client.model == "chatglm":
            await client.chat(**{name: SMALL.get(name, value), "max_tokens": 33})
            return
        given, _ = await client.text(**{"said": "?", "max_tokens": 4000, name: value})
        told = TOLD.get(name, {})
        proof = told.get(client.model, told.get("", json.dumps(value).strip('[]"')))
        assert proof in given, given


async def outcome(client: Client, asked: Row) -> str:
    """Return a cell of the table.

    Raises:
        AssertionError: it is neither an answer nor a refusal by name.
    """
    try:
        await asked.check(client)
    except RefusedError as refused:
        if str(refused) not in asked.params:
            raise
        return "400"
    return "✓"


@pytest.fixture(scope="module")
def outcomes(foreign: Foreign) -> dict[tuple[str, str], str | Exception]:
    """What came of each row on each model: a cell of the table, or an error."""

    async def run() -> dict[tuple[str, str], str | Exception]:
        found: dict[tuple[str, str], str | Exception] = {}
        async with httpx.AsyncClient(base_url=foreign.gateway.base_url, timeout=60) as http:

            async def column(model: str) -> None:
                client = Client(foreign, http, model)
                for each in ROWS:
                    try:
                        found[each.english, model] = await outcome(client, each)
                    except Exception as error:  # noqa: BLE001 - the row's own test raises it
                        found[each.english, model] = error

            await asyncio.gather(*map(column, MODELS))
        return found

    return asyncio.run(run())


def test_every_dialect_is_asked() -> None:
    names = [{name for name, _, _ in INPUTS[model]} for model in MODELS if model in INPUTS]
    contracts = _FOREIGN.items()
    played = {next(name for name, contract in contracts if contract.inputs <= inputs) for inputs in names}
    assert {"chatglm", *played} == set(DIALECTS)


@pytest.mark.parametrize("asked", ROWS, ids=lambda each: each.english)
def test_it_works_or_is_refused_by_name(outcomes: dict[tuple[str, str], str | Exception], asked: Row) -> None:
    cells = {model: outcomes[asked.english, model] for model in MODELS}
    failed = {model: repr(cell) for model, cell in cells.items() if isinstance(cell, Exception)}
    assert not failed


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_the_table_in_the_documentation_is_what_was_seen(
    outcomes: dict[tuple[str, str], str | Exception], language: str
) -> None:
    assert not any(isinstance(cell, Exception) for cell in outcomes.values())  # before it is written
    file = DOCS / {"english": "dialects.md", "chinese": "dialects.zh.md"}[language]
    rows = [["", *MODELS.values()], ["---"] * (len(MODELS) + 1)]
    rows += [
        [getattr(each, language), *(str(outcomes[each.english, model]) for model in MODELS)] for each in ROWS
    ]
    table = "\n".join("| " + " | ".join(cells).strip() + " |" for cells in rows)
    before, marker, rest = file.read_text(encoding="utf-8").partition(MARKER)
    _, end, after = rest.partition("<!-- end -->")
    expected = f"{before}{marker}{table}\n{end}{after}"
    if os.environ.get("WRITE_DOCS"):
        file.write_text(expected, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == expected
