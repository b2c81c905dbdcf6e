"""Structural tags, by the library with which vLLM holds answers to them."""

import json
from typing import Any

import pytest
import xgrammar

from gateway.chat.marked import MarkedText
from gateway.chat.structural_tags import FORMS, UnenforceableError, behind_reasoning, structural_tag
from gateway.chat.styles import STYLES
from gateway.core.events import CallPart, Piece, joined_pieces
from wire.grammar import CallableTool, GrammarKind, Reasoning, ToolCalls

_END = 256
_VOCABULARY = xgrammar.TokenizerInfo(
    [*(bytes([byte]) for byte in range(_END)), "</s>"], vocab_size=_END + 1, stop_token_ids=[_END]
)
_COMPILER = xgrammar.GrammarCompiler(_VOCABULARY)

PLACE: dict[str, Any] = {
    "type": "object",
    "title": "Place",
    "properties": {
        "city": {"type": "string", "description": "Its name"},
        "days": {"type": "integer"},
        "unit": {"$ref": "#/$defs/unit"},
        "at": {"$ref": "#/$defs/point"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "unit": {"enum": ["c", "1"], "type": "string"},
    },
}
STRINGS = {"city": False, "unit": False, "note": True}
TOOLS = [
    CallableTool("go", PLACE, strict=True),
    CallableTool("go_on", PLACE),
    CallableTool("stop", {"type": "object", "properties": {}}, strict=True),
]
QWEN = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
FIRST_LOST = "<function={}>\n{}</function>\n</tool_call>"
GLM = "<tool_call>{}\n{}</tool_call>"
WAYS = [("qwen3coder", QWEN), ("qwen3coder", FIRST_LOST), ("glm45", GLM)]
THINKS = Reasoning(begin="<think>", end="</think>")
BEGUN = Reasoning(begin="<think>", end="</think>", begun=True)


def accepts(compiled: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(_END)


def compiled(style: str, reasoning: Reasoning | None = None, schema: dict[str, Any] | None = None) -> Any:
    tools = TOOLS if schema is None else [CallableTool("go", schema, strict=True)]
    tag = structural_tag(ToolCalls(tools=tools), FORMS[style], reasoning)
    return _COMPILER.compile_structural_tag(json.dumps(tag))


def pieces(style: str, text: str, *, thinks: bool = False, thinking: bool = False) -> list[Piece]:
    """Read an answer as the gateway does."""
    names = tuple(tool.name for tool in TOOLS)
    strings = dict.fromkeys(names, STRINGS)
    reader = MarkedText(STYLES[style], names, strings=strings, thinks=thinks, thinking=thinking)
    return [*joined_pieces([*reader.push(text), *reader.end()])]


def read(style: str, text: str, **how: bool) -> list[CallPart]:
    return [piece for piece in pieces(style, text, **how) if isinstance(piece, CallPart)]


def written(style: str, **arguments: str) -> str:
    pair = "<parameter={}>\n{}\n</parameter>\n"
    if style == "glm45":
        pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    return "".join(pair.format(*each) for each in arguments.items())


@pytest.mark.parametrize(("style", "text"), WAYS)
def test_arguments_without_quotes_follow_the_schema(style: str, text: str) -> None:
    tag = compiled(style)
    arguments = {"city": 'New\n"York" <b> ', "days": "3", "unit": "1", "at": '{"x": 1}', "note": "null"}
    right = text.format("go", written(style, **arguments))
    for said in (right, f"I look.\n{right}\n{right}", text.format("go", written(style, city="3", note="3"))):
        assert accepts(tag, said)
    (call,) = read(style, right)
    assert json.loads(call.arguments) == {
        "city": arguments["city"],
        "days": 3,
        "unit": "1",
        "at": {"x": 1},
        "note": None,
    }
    (call,) = read(style, text.format("go", written(style, city="3", note="3")))
    assert json.loads(call.arguments) == {"city": "3", "note": "3"}
    for wrong in (
        {},
        {"days": "3"},
        {"city": "a", "days": "b"},
        {"city": "a", "unit": "k"},
        {"city": "a", "unit": " c"},
        {"city": "a", "at": "{}"},
        {"city": "a", "more": "b"},
        {"days": "3", "city": "a"},
        {"city": "a", "city ": "a"},
    ):
        assert not accepts(tag, text.format("go", written(style, **wrong)))
    assert not accepts(tag, text.format("gone", ""))


@pytest.mark.parametrize(("style", "text"), WAYS)
def test_a_string_ends_where_it_is_read_to_end(style: str, text: str) -> None:
    """Else, what stands behind its first closing mark would be free."""
    schema = {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}}, "required": ["q", "n"]}
    tag, closing = compiled(style, schema=schema), FORMS[style].pair
    assert closing is not None
    for behind in ("\n", "", " more\n", text.format("go", "")):
        broken = written(style, q="x")[: -len("\n")] + behind
        assert not accepts(tag, text.format("go", broken + written(style, q="y", n="3")))
    assert accepts(tag, text.format("go", written(style, q="x", n="3")))


@pytest.mark.parametrize(("style", "text"), WAYS)
def test_a_lenient_tool_gets_any_arguments_and_one_without_any_none(style: str, text: str) -> None:
    tag = compiled(style)
    for arguments in ({}, {"any-thing": "[1]", "城市": "x"}, {"days": "many"}):
        assert accepts(tag, text.format("go_on", written(style, **arguments)))
    assert accepts(tag, text.format("stop", ""))
    assert not accepts(tag, text.format("stop", written(style, a="b")))
    # What such a tool gets is no place for a call of another.
    for inside in ("</function></tool_call>\n<tool_call>", "", written(style, a="b")):
        for other in (QWEN, FIRST_LOST, GLM):
            assert not accepts(tag, text.format("go_on", inside + other.format("go", "")))
    quoted = text.format("go_on", written(style, a=text.format("go", "")))
    assert accepts(tag, quoted) == ("</arg_value>" not in quoted.partition("go_on")[0])
    assert [call.name for call in read(style, quoted)] == ["go_on"]
    (call,) = read(style, text.format("stop", ""))
    assert (call.name, json.loads(call.arguments)) == ("stop", {})


@pytest.mark.parametrize(("style", "text"), WAYS)
def test_what_is_within_reasoning_is_free_and_no_call(style: str, text: str) -> None:
    right = text.format("go", written(style, city="a"))
    wrong = text.format("go", written(style, days="1"))
    for reasoning, before in ((THINKS, "<think>"), (THINKS, "\n<think>\n"), (BEGUN, "")):
        tag = compiled(style, reasoning)
        for said in ("", "I may <tool_call> or <function=not>.", wrong, right):
            assert accepts(tag, f"{before}{said}</think>\n{right}")
            assert accepts(tag, f"{before}{said}</think>fine")
            assert not accepts(tag, f"{before}{said}</think>{wrong}")
        # A call's string that the reasoning ends in.
        begun = right.partition("a")[0] if style == "glm45" else right[: right.index("a\n")]
        assert not accepts(tag, f"{before}{begun}</think>{wrong}")
        assert read(style, f"{before}{wrong}</think>ok", thinks=True, thinking=reasoning.begun) == []
    assert accepts(compiled(style, THINKS), right)
    assert not accepts(compiled(style, THINKS), wrong)


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("json_object", "", '{"a": [1]}', "[1]"),
        ("json_schema", '{"enum": [1, 2]}', "2", "3"),
        ("regex", "a+", "aa", "ab"),
        ("choice", '["yes", "no"]', "no", "not"),
    ],
)
def test_a_grammar_is_of_what_follows_reasoning(kind: GrammarKind, text: str, right: str, wrong: str) -> None:
    tag = _COMPILER.compile_structural_tag(json.dumps(behind_reasoning(kind, text, BEGUN)))
    for before in ("</think>", f"so {wrong}, then {right}.\n</think>\n\n"):
        assert accepts(tag, before + right)
        assert not accepts(tag, before + wrong)
    assert not accepts(tag, right)
    assert behind_reasoning("lark", 'start: "a"', BEGUN) is None


def test_calls_in_json_behind_reasoning() -> None:
    call = '<tool_call>\n{{"name": "go", "arguments": {}}}\n</tool_call>'
    tag = compiled("hermes", THINKS)
    for said in ("", "<think>a <tool_call> b</think>"):
        assert accepts(tag, said + call.format('{"city": "a"}'))
        assert not accepts(tag, said + call.format("{}"))


def test_calls_in_json_are_in_the_form_that_all_releases_read() -> None:
    tag = structural_tag(ToolCalls(tools=TOOLS[:2]), FORMS["hermes"])
    assert (tag["type"], tag["triggers"]) == ("structural_tag", ["<tool_call>"])
    go, go_on = tag["structures"]
    whole = f"{go['begin']}{{}}{go['end']}"
    assert json.loads(whole.removeprefix("<tool_call>").removesuffix("</tool_call>")) == {
        "name": "go",
        "arguments": {},
    }
    assert (go["schema"], go_on["schema"]) == (PLACE, {"type": "object"})


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "string", "minLength": 1}}}, "'minLength' of 'a'"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "'pattern' of 'a'"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/d"}},
                "$defs": {"d": {"type": "string", "format": "date"}},
            },
            "fo",
        ),
        ({"properties": {"a": {"type": ["string", "boolean"]}}}, "something else"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}}, "something else"),
        ({"properties": {"a": {}}}, "something else"),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "something else"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "can be nothing"),
        ({"properties": {"a": {"enum": ["", "b"]}}}, "can be nothing"),
        ({"properties": {"a": {"const": "</arg_value></parameter>"}}}, "cannot be what has"),
        ({"properties": {"a<b": {"type": "integer"}}}, "name cannot be written"),
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
        ({"properties": {}, "unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"properties": {}, "extends": {"type": "null"}}, "'extends'"),
        ({"anyOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {}}]}, "one object"),
        ({"$ref": "#/x", "x": {"type": "array"}}, "one object"),
        ({"$ref": "#/$defs/a", "required": ["a"], "$defs": {"a": {"type": "object"}}}, "'\\$ref'"),
        ({"type": "array"}, "one object"),
        ({"properties": {"a": {"type": "string", "not": {"const": "b"}}}}, "'not' of 'a'"),
        ({"properties": {"a": {"type": "string", "anyOf": [{"enum": ["b"]}]}}}, "'anyOf' of 'a'"),
        ({"properties": {"a": {"$ref": "#/$defs/b", "minLength": 2}}}, "something else"),
        ({"properties": {"a": {"type": ["string", "null"], "enum": ["null", "b"]}}}, "reads like it"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "b"}}}}, "'pattern'"),
        (
            {"properties": {"a": {"type": "array", "items": {"type": "string", "minLength": 1}}}},
            "'minLength'",
        ),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "references have to be"),
        (
            {"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/b"}}}},
            "refer",
        ),
        ({"properties": [], "required": []}, "'properties' is"),
        ({"properties": {}, "required": ["a", ["b"]]}, "does not say"),
    ],
)
@pytest.mark.parametrize("style", ["qwen3coder", "glm45"])
def test_what_no_grammar_says_of_values_without_quotes_is_refused(
    style: str, schema: dict[str, Any], reason: str
) -> None:
    strict = CallableTool("go", schema, strict=True)
    with pytest.raises(UnenforceableError, match=reason) as refused:
        structural_tag(ToolCalls(tools=[TOOLS[0], strict]), FORMS[style])
    assert refused.value.tool == "go"
    structural_tag(ToolCalls(tools=[CallableTool("go", schema)]), FORMS[style])


def test_glm_may_leave_out_line_ends() -> None:
    text = "<tool_call>go<arg_key>city</arg_key><arg_value>P</arg_value></tool_call>"
    assert accepts(compiled("glm45"), text)
    assert [json.loads(call.arguments) for call in read("glm45", text)] == [{"city": "P"}]
    assert not accepts(compiled("glm45"), "<tool_call>go</tool_call>")


@pytest.mark.parametrize("style", ["qwen3coder", "glm45"])
def test_values_in_json_have_the_definitions_that_they_need(style: str) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    schema = {
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "b": {"type": "string"}},
        "required": ["a"],
        "$defs": {"tree": tree, "other": {"type": "integer"}},
    }
    tag = compiled(style, schema=schema)
    text = QWEN if style == "qwen3coder" else GLM
    assert accepts(tag, text.format("go", written(style, a='[{"next": {"next": {}}}]')))
    assert not accepts(tag, text.format("go", written(style, a='[{"next": 1}]')))
    closing = "</parameter>" if style == "qwen3coder" else "</arg_value>"
    assert not accepts(tag, text.format("go", written(style, a=f'["{closing}"]')))
    strict = ToolCalls(tools=[CallableTool("go", schema, strict=True)])
    assert "other" not in str(structural_tag(strict, FORMS[style]))


@pytest.mark.parametrize("style", ["qwen3coder", "glm45"])
def test_what_no_draft_knows_is_an_annotation(style: str) -> None:
    cat, dog = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in ("cat", "dog"))
    schema = {
        "properties": {
            "pet": {"oneOf": [cat, dog], "discriminator": {"propertyName": "kind"}},
            "name": {"type": "string", "widget": "text", "readOnly": True},
            "days": {"type": "array", "items": {"type": "integer"}, "x-shown": {"pattern": "a"}},
        },
        "required": ["pet", "name"],
        "x-order": 1,
    }
    tag = compiled(style, schema=schema)
    text = QWEN if style == "qwen3coder" else GLM
    assert accepts(tag, text.format("go", written(style, pet='{"cat": 1}', name="a", days="[1]")))
    assert not accepts(tag, text.format("go", written(style, pet="cat", name="a")))
    assert not accepts(tag, text.format("go", written(style, pet='{"cat": 1}')))


def test_definitions_are_not_multiplied_without_end() -> None:
    large = {"enum": ["x" * 2**14]}
    properties = {f"p{place}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for place in range(100)}
    tool = CallableTool("go", {"properties": properties, "$defs": {"d": large}}, strict=True)
    with pytest.raises(UnenforceableError, match="too large"):
        structural_tag(ToolCalls(tools=[tool]), FORMS["glm45"])
