"""The documents' table of parameters, held against the SDK's requests and against the gateway, row by row."""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway.core.events import Delta, Event, Reasoning
from gateway.core.request import Generation
from gateway.openai import chat_request, responses_request
from gateway.openai import completions as completion_request
from tests.gateway.fake_upstream import FakeUpstream, say_choices
from tests.gateway.serving import Served, in_process

ROOT = Path(__file__).parents[2]
KINDS = {
    "docs/parameters.md": (
        "honoured",
        "honoured, beyond OpenAI",
        "bookkeeping",
        "ignored, named in the header",
        "refused (400)",
    ),
    "docs/parameters.zh.md": ("生效", "生效（OpenAI 之外）", "登记", "忽略并在响应头中列出", "拒绝（400）"),
}
HONOURED, BEYOND, BOOKKEEPING, IGNORED, REFUSED = KINDS["docs/parameters.md"]


@dataclass(frozen=True)
class Route:
    """What the SDK and the gateway say that a route takes, and a request that each parameter is added to."""

    sdk: Any
    fields: frozenset[str]
    neutral: Mapping[str, Any]
    base: Mapping[str, Any]

    @property
    def sdk_names(self) -> frozenset[str]:
        return frozenset(self.sdk.__required_keys__ | self.sdk.__optional_keys__)


ROUTES = {
    "/v1/chat/completions": Route(
        chat_create_params.CompletionCreateParamsStreaming,
        frozenset(chat_request.ChatRequest.model_fields),
        chat_request.ChatRequest.unsupported,
        {"model": "glm", "messages": [{"role": "user", "content": "hi"}]},
    ),
    "/v1/completions": Route(
        completion_create_params.CompletionCreateParamsStreaming,
        frozenset(completion_request.CompletionRequest.model_fields),
        completion_request.CompletionRequest.unsupported,
        {"model": "glm", "prompt": "hi"},
    ),
    "/v1/responses": Route(
        response_create_params.ResponseCreateParamsStreaming,
        frozenset(responses_request.ResponsesRequest.model_fields),
        responses_request.ResponsesRequest.unsupported,
        {"model": "glm", "input": "hi"},
    ),
}

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
LOGPROBS = ["message.output_text.logprobs"]
ASKING_FOR: Mapping[str, Any] = {
    "model": "org/glm-2",
    "messages": [{"role": "user", "content": "and now?"}],
    "prompt": "and now?",
    "input": "and now?",
    "instructions": "Be brief.",
    "temperature": 0.5,
    "top_p": 0.5,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "max_output_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["."],
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "use_beam_search": True,
    "best_of": 3,
    "length_penalty": 0.5,
    "early_stopping": True,
    "echo": True,
    "response_format": {"type": "json_object"},
    "text": {"format": {"type": "json_object"}},
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "functions": [FUNCTION],
    "function_call": {"name": "f"},
    "top_k": 3,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "prompt_logprobs": 2,
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "allowed_token_ids": [5, 6],
    "bad_words": ["no"],
    "truncate_prompt_tokens": 2,
    "priority": 1,
    "include_reasoning": False,
    "include_timings": True,
    "user": "ann",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
}
"""A value of each parameter that asks for something; those that the table gives a value have that one."""

ON_ONE_ROUTE: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"logprobs": 2},
    "/v1/responses": {
        "tools": [{"type": "function", **FUNCTION}],
        "stream_options": {"include_obfuscation": True},
    },
}

BESIDE: Mapping[str, tuple[str, ...]] = {
    "stream_options": ("stream",),
    "top_logprobs": ("logprobs", "include"),
    "return_tokens_as_token_ids": ("logprobs",),
    "tool_choice": ("tools",),
    "parallel_tool_calls": ("tools",),
    "function_call": ("functions",),
    "use_beam_search": ("n",),
    "best_of": ("n", "use_beam_search"),
    "length_penalty": ("n", "use_beam_search"),
    "early_stopping": ("n", "use_beam_search"),
}
"""What a parameter needs beside it, where the route has that."""

REPEATED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier")
"""What a response says of bookkeeping, in its own field of the same name."""


@dataclass(frozen=True)
class Row:
    """One parameter of the table; `example` is the value in it, or None."""

    route: str
    kind: str
    name: str
    example: Any


def rows_of(page: str) -> list[Row]:
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text.split("<!-- parameters -->\n")[1].split("<!-- /parameters -->")[0]
    rows = []
    for line in table.splitlines()[2:]:
        route, kind, parameters = (cell.strip() for cell in line.strip("|").split("|"))
        for item in re.findall(r"`(.*?)`", parameters):
            name, _, example = item.partition(": ")
            kind_here = KINDS["docs/parameters.md"][KINDS[page].index(kind)]
            rows.append(Row(route.strip("`"), kind_here, name, json.loads(example) if example else None))
    return rows


ROWS = rows_of("docs/parameters.md")


def test_both_languages_have_the_same_table() -> None:
    assert rows_of("docs/parameters.zh.md") == ROWS


@pytest.mark.parametrize("path", ROUTES)
def test_every_parameter_of_the_sdk_and_of_the_gateway_is_in_the_table(path: str) -> None:
    route = ROUTES[path]
    listed = {row.name for row in ROWS if row.route == path}
    assert route.sdk_names - listed == set(), "parameters of the installed SDK"
    assert (route.fields | set(route.neutral)) - listed == set(), "parameters of the gateway"
    for row in ROWS:
        if row.route == path and row.kind in {HONOURED, BEYOND}:
            assert (row.name in route.sdk_names) == (row.kind == HONOURED), row.name


def test_no_parameter_stands_twice() -> None:
    named = [(row.route, row.name) for row in ROWS if row.example is None]
    assert len(set(named)) == len(named)


@dataclass(frozen=True)
class Observed:
    """What a request came to: its status and body, what the upstream was asked, and what was ignored."""

    status: int
    answer: Any
    asked: Any
    ignored: str | None = None

    @property
    def error_param(self) -> str:
        return str(self.answer["error"]["param"])


async def think_and_say(request: Generation) -> AsyncGenerator[Event, None]:
    async for event in say_choices(request):
        if isinstance(event, Delta):
            yield msgspec.structs.replace(event, pieces=(Reasoning("Hm."), *event.pieces))
        else:
            yield event


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with in_process(FakeUpstream(think_and_say)) as served:
        yield served


async def observe(served: Served, path: str, body: Mapping[str, Any]) -> Observed:
    served.upstream.requests.clear()
    response = await served.http.post(path, json=dict(body))
    asked = [
        {
            name: value
            for name, value in msgspec.structs.asdict(request).items()
            if name not in {"request_id", "deadline"}
        }
        for request in served.upstream.requests
    ]
    if response.is_error:
        return Observed(response.status_code, response.json(), asked)
    answer = re.sub(
        r'"(id|item_id)":"\w+-?\w*"|"(created|created_at|completed_at)":[\d.]+', "", response.text
    )
    return Observed(response.status_code, answer, asked, response.headers.get("x-tritongate-ignored"))


def value_of(row: Row) -> Any:
    if row.example is not None:
        return row.example
    here = ON_ONE_ROUTE.get(row.route, {})
    return here.get(row.name, ASKING_FOR.get(row.name, {"some": "thing"}))


def beside(row: Row) -> dict[str, Any]:
    """Return the request that `row`'s parameter is added to."""
    route = ROUTES[row.route]
    needed = {name for name in BESIDE.get(row.name, ()) if name in route.fields}
    listed = [other for other in ROWS if other.route == row.route and other.kind in {HONOURED, BEYOND}]
    return {**route.base, **{other.name: value_of(other) for other in listed if other.name in needed}}


def rows(*kinds: str) -> list[Any]:
    return [
        pytest.param(row, id=f"{row.route} {row.name}={row.example}") for row in ROWS if row.kind in kinds
    ]


@pytest.mark.parametrize("row", rows(HONOURED, BEYOND))
async def test_what_is_honoured_has_an_effect(row: Row, served: Served) -> None:
    assert row.name in ROUTES[row.route].fields
    without = beside(row)
    before = await observe(served, row.route, without)
    after = await observe(served, row.route, {**without, row.name: value_of(row)})
    assert (before.status, after.status) == (200, 200), after.answer
    assert (before.answer, before.asked) != (after.answer, after.asked)


@pytest.mark.parametrize("row", rows(BOOKKEEPING))
async def test_bookkeeping_changes_nothing(row: Row, served: Served) -> None:
    body = ROUTES[row.route].base
    before = await observe(served, row.route, body)
    after = await observe(served, row.route, {**body, row.name: value_of(row)})
    assert after.status == 200
    assert after.asked == before.asked
    if row.route == "/v1/responses" and row.name in REPEATED:
        ours = re.compile(rf'"{row.name}":(null|"\w*"|{{.*?}})')
        assert ours.sub("", after.answer) == ours.sub("", before.answer)
    else:
        assert after.answer == before.answer


@pytest.mark.parametrize("row", rows(IGNORED))
async def test_what_is_ignored_changes_nothing_and_is_named(row: Row, served: Served) -> None:
    body = dict(ROUTES[row.route].base)
    if row.name == "stream_options":
        body["stream"] = True
    before = await observe(served, row.route, body)
    after = await observe(served, row.route, {**body, row.name: value_of(row)})
    assert after.ignored is not None
    assert {name.split(".")[0] for name in after.ignored.split(", ")} == {row.name}
    assert before.ignored is None
    assert (after.status, after.asked) == (200, before.asked)


@pytest.mark.parametrize("row", rows(REFUSED))
async def test_what_is_refused_is_a_400_that_names_it(row: Row, served: Served) -> None:
    body = dict(ROUTES[row.route].base)
    if row.name == "stream_options":
        body["stream"] = True
    answer = await observe(served, row.route, {**body, row.name: value_of(row)})
    assert answer.status == 400
    assert answer.error_param.split(".")[0] == row.name
    assert row.name in answer.answer["error"]["message"]
    assert not answer.asked


@pytest.mark.parametrize("path", ROUTES)
async def test_neutral_values_and_null_ask_for_nothing(path: str, served: Served) -> None:
    route = ROUTES[path]
    before = await observe(served, path, route.base)
    for document in (dict(route.neutral), dict.fromkeys({*route.neutral, *route.fields} - set(route.base))):
        assert await observe(served, path, {**document, **route.base}) == before
