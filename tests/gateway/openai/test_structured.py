import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.request import Conversation, Grammar
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Reading
from gateway.openai.params import GenerationRequest
from gateway.openai.structured import MAX_DEPTH, REPEATS_LIMIT, grammar_of, patterns_of, repeats
from wire.limits import GRAMMAR_LIMIT

SCHEMA = {"type": "object", "properties": {"城": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "now"}}]


def chat(**parameters: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **parameters}
    return ChatRequest.read(json.dumps(body).encode())


def completion(**parameters: Any) -> GenerationRequest:
    return CompletionRequest.read(json.dumps({"model": "m", "prompt": "hi", **parameters}).encode())


def json_schema(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("parameters", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": json_schema(strict=True, description="d")},
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "json_object",
            "",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.value",
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "none"},
            "json_object",
            "",
            "response_format",
        ),
    ],
)
def test_response_formats(parameters: dict[str, Any], kind: str, text: Any, field: str) -> None:
    asked = chat(**parameters).generations(request_id="r", deadline=0)[0]
    assert asked.grammar is not None
    assert (asked.grammar.kind, asked.grammar.field) == (kind, field)
    assert (json.loads(asked.grammar.text) if kind == "json_schema" else asked.grammar.text) == text
    assert asked.grammar_field() == field


def test_a_schema_beside_free_text_is_ignored_by_name() -> None:
    reading = Reading()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    form = {"type": "text", "schema": {"type": "null"}}
    asked = ChatRequest.read(json.dumps({**body, "response_format": form}).encode(), reading)
    assert asked.generations(request_id="r", deadline=0)[0].grammar is None
    assert list(reading.ignored) == ["response_format.schema"]


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize(
    ("outputs", "kind", "text"),
    [
        ({"json": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"json": '{"type": "null"}'}, "json_schema", '{"type":"null"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["是", "no"], "regex": None}, "choice", '["是","no"]'),
        ({"grammar": "start: /a/", "json_object": False}, "lark", "start: /a/"),
        ({"json_object": True, "disable_any_whitespace": False, "structural_tag": None}, "json_object", ""),
    ],
)
def test_structured_outputs(
    read: Callable[..., GenerationRequest], outputs: dict[str, Any], kind: Any, text: str
) -> None:
    asked = read(structured_outputs=outputs).generations(request_id="r", deadline=0)[0]
    name = next(name for name, value in outputs.items() if value is not None)
    assert asked.grammar == Grammar(kind=kind, text=text, field=f"structured_outputs.{name}")


@pytest.mark.parametrize("parameters", [{}, {"structured_outputs": None}])
def test_text_is_free_where_nothing_is_said(parameters: dict[str, Any]) -> None:
    for asked in (chat(response_format={"type": "text"}, **parameters), completion(**parameters)):
        assert asked.generations(request_id="r", deadline=0)[0].grammar is None


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema() | {"strict": True}}, "response_format.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(deep(MAX_DEPTH + 1))}, "response_format.json_schema.schema"),
        (
            {"response_format": json_schema({"description": "x" * GRAMMAR_LIMIT})},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        *(
            ({"structured_outputs": {"json": {}, name: value}}, f"structured_outputs.{name}")
            for name, value in (
                *(("disable_any_whitespace", True), ("disable_additional_properties", True)),
                *(("whitespace_pattern", " ?"), ("structural_tag", "{}")),
            )
        ),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * (GRAMMAR_LIMIT + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"choice": ["a" * GRAMMAR_LIMIT]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_refused(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(**parameters)
    assert refused.value.param == param


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tools_may_stand_beside_it(choice: str) -> None:
    asked = chat(response_format={"type": "json_object"}, tools=TOOLS, tool_choice=choice)
    generation = asked.generations(request_id="r", deadline=0)[0]
    assert isinstance(generation.prompt, Conversation)
    assert generation.prompt.offer is not None
    assert generation.grammar == Grammar(kind="json_object", field="response_format")
    # With both, a refusal may be about neither alone.
    fields = {"auto": None, "none": "response_format", "required": "tools"}
    assert generation.grammar_field() == fields[choice]
    schema = "response_format" if choice == "none" else "tools.0.function.parameters"
    assert generation.grammar_field(TOOLS[0]["function"]["name"]) == schema
    assert generation.grammar_field(text=True) == "response_format"


def test_what_is_nested_to_the_limit_passes() -> None:
    assert chat(response_format=json_schema(deep(MAX_DEPTH)))
    assert chat(response_format={"type": "text"}, tools=TOOLS)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 1),
        ("a{7}", 7),
        ("a{2,7}b{3,5}", 7),
        ("a{7,}", 7),
        ("a{0}", 1),
        ("(a{1,1000}){1,1000}", 1_000_000),
        ("((a{2}){3}b{100}){4}", 400),
        ("(?:a{2}|(b{3})+){5}", 15),
        ("a{2}{3}", 6),
        ("a{3}?{4}", 12),
        (r"(\{9\}[{9}a(]\p{Lu}\x{41}{2}){3}", 6),
        (r"[]a)]{4}([\]{8}]){2}", 4),
        ("a)b{3}(", 3),
        ("[[:alpha:]]{5}", 5),
        (r"{x}{,3}", 1),
    ],
)
def test_repetitions_multiply(pattern: str, count: int) -> None:
    assert repeats(pattern) == count


def test_patterns_of_a_schema_are_found_anywhere() -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "a"}},
        "anyOf": [{"patternProperties": {"b": {"items": {"pattern": "c"}}}}],
    }
    assert sorted(patterns_of(schema)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("regex", "(a{1,1000}){1,1000}"),
        ("json", {"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
        ("json", '{"type": "string", "pattern": "((a{99}){99}){99}"}'),
    ],
)
def test_what_multiplies_too_far_is_refused_by_name(way: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {REPEATS_LIMIT}") as refused:
        grammar_of(way, value, f"structured_outputs.{way}")
    assert refused.value.param == f"structured_outputs.{way}"


def test_usual_expressions_are_not() -> None:
    for pattern in (r"(\w{1,200} ){1,200}", r"\d{4}-\d{2}-\d{2}", "a{1,9999}b{1,9999}", ".*"):
        assert grammar_of("regex", pattern, "structured_outputs.regex") is not None


def test_the_time_that_it_takes_grows_with_the_length_alone() -> None:
    assert repeats("(" * 100_000 + "a{9}" + "){9}" * 20) > REPEATS_LIMIT
    for part in ("[", "{", "\\p{", "[^]", "[\\", "{9", "[[:a"):
        assert repeats(part * 100_000) == 1
    assert repeats("a" + "{9}" * 100_000) == 10**12
    assert repeats("a{" + "9" * 100_000 + "}") == 1  # no number that anything takes
