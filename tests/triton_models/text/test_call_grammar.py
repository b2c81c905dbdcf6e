"""Calls in the formats' own notations: whatever a walk says, its arguments obey the tool's schema."""

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from tests.triton_models.text.walks import Walk, Walker, Words
from triton_models.errors import InvalidGrammarError
from triton_models.text.grammars import GrammarMask
from triton_models.text.tokenizers import Tokenizer
from wire.calls import NOTATIONS
from wire.grammar import TEXT_PART, CallableTool, Grammar, Part, ToolCalls, part_at_fault

SEEDS = range(10)


def obj(required: Any = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names}


SCHEMAS: dict[str, dict[str, Any]] = {
    "only required": obj(["b", "a", "c"], a={"type": "boolean"}, b={"type": "null"}),
    "plain": obj(city={"type": "string"}, days={"type": "integer", "minimum": 1}),
    "optional": obj(
        ["b"], a={"type": "boolean"}, b={"type": "null"}, c={"type": "number"}, d={"type": "string"}
    ),
    "all optional": obj([], a={"type": "boolean"}, b={"type": "integer"}),
    "at least one": obj([], a={"type": "boolean"}, b={"type": "integer"}, c=True) | {"minProperties": 1},
    "enums": obj(a={"enum": ["it's", "你", 'say "x"', None, True, 1.5, -2]}, b={"const": {"k": [1, "z"]}}),
    "constants of any text": obj(a={"const": {"😀": "城"}}, b={"enum": [[{"k": "é"}]]}),
    "strings": obj(
        a={"type": "string", "pattern": "^[a-c'\"]{1,3}$"},
        b={"type": "string", "minLength": 2, "maxLength": 4},
        c={"type": "string", "format": "date"},
    ),
    "checked": obj(
        a={
            "type": "string",
            "format": "includes",
            "minLength": 2,
            "maxLength": 6,
            "allOf": [{"type": "string", "pattern": "^a.*"}, {"pattern": ".*c$"}],
        },
        b={"type": "string", "format": "hex", "pattern": "^[0-9a-f]{2}$"},
    ),
    "numbers": obj(
        a={"type": "integer", "minimum": -3, "maximum": 7},
        b={"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
        c={"type": "integer", "multipleOf": 5, "format": "int64"},
        d={"type": "number", "maximum": -4},
    ),
    "arrays": obj(
        a={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        b={"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
        c={"type": "array", "maxItems": 2},
        d={"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
        e={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1},
    ),
    "old tuples": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **obj(
            a={"type": "array", "items": [{"const": 1}, {"type": "null"}], "additionalItems": False},
            b={"type": "array", "items": {"type": "boolean"}, "additionalItems": False, "maxItems": 3},
            c={"$ref": "#/properties/a/items/1"},
        ),
    },
    "nested": obj(a=obj(["y"], x={"type": ["integer", "null"]}, y={"type": "boolean"}), b={"type": "object"}),
    "references": {
        **obj(t={"$ref": "#/$defs/tree"}),
        "$defs": {
            "tree": obj(["v"], v={"type": "boolean"}, c={"type": "array", "items": {"$ref": "#/$defs/tree"}})
        },
    },
    "unions": obj(
        a={"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None, "title": "A"},
        b={"oneOf": [obj(k={"const": "x"}), obj(k={"const": "y"}, n={"type": "integer"})]},
    ),
    "names": obj(
        **{
            "from": {"type": "integer"},
            "a b": {"type": "boolean"},
            "城": {"type": "null"},
            "it's": {"const": 1},
        }
    ),
    "a map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "records": {
        "$ref": "#/$defs/record",
        "$defs": {
            "name": {"type": "string", "description": "any"},
            "record": {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/name"},
                "additionalProperties": {
                    "anyOf": [{"propertyNames": True, "maxProperties": 1}, {"type": "null"}]
                },
                "maxProperties": 2,
            },
        },
    },
    "listed names": obj(
        a={
            "type": "object",
            "propertyNames": {"enum": ["x", "y"]},
            "additionalProperties": {"type": "boolean"},
            "required": ["x"],
        }
    ),
    "nothing": {},
    "anything": obj(a={}, b=True),
    "closed": {**obj(a={"type": "boolean"}), "additionalProperties": False},
}


UNENFORCED: dict[str, Any] = {
    "not": {},
    "if": {},
    "then": {"type": "null"},
    "else": {"type": "null"},
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "uniqueItems": True,
    "propertyNames": {"maxLength": 1},
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "extends": {"type": "null"},
    "disallow": "string",
    "divisibleBy": 2,
    "requires": "a",
    "maxDecimal": 2,
    "minimumCanEqual": False,
    "maximumCanEqual": False,
}


@pytest.fixture(scope="module", params=["chatglm3", "glm4"])
def walker(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Walker:
    return Walker(tokenizers[request.param], request.param)


def rules(*tools: CallableTool, **more: Any) -> str:
    return msgspec.json.encode(ToolCalls(tools=list(tools), **more)).decode()


def read(walker: Walker, content: str) -> dict[str, Any]:
    if walker.format.name == "glm4":
        # With numbers beyond any that the notation's own reader takes.
        found: dict[str, Any] = json.loads(content)
        return found
    arguments = NOTATIONS[walker.format.name].read(content)
    assert arguments is not None, content
    return arguments


def segments(walk: Walk) -> list[str]:
    edges = [0, *walk.segments, len(walk.text)]
    return [walk.text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_obey_the_schema(walker: Walker, name: str, strict: bool) -> None:
    tool = CallableTool("f", SCHEMAS[name], strict=strict)
    ended = 0
    for seed in SEEDS:
        walk = walker.walk("tool_calls", rules(tool, required=True, single=True), metadata="f", seed=seed)
        if walk.ended:
            ended += 1
            jsonschema.validate(read(walker, walk.text), SCHEMAS[name])
    assert ended > len(SEEDS) / 3


POINT = obj(x={"type": "boolean"})
NESTED = {
    "in an object": obj(a=POINT),
    "in an array": obj(a={"type": "array", "items": POINT, "minItems": 1, "maxItems": 1}),
    "by reference": {**obj(a={"$ref": "#/$defs/point"}), "$defs": {"point": POINT}},
    "by reference alone": {"$ref": "#/$defs/point", "$defs": {"point": POINT}},
    "or nothing": {
        **obj(a={"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}),
        "$defs": {"point": POINT},
    },
}


@pytest.mark.parametrize("name", NESTED)
def test_no_object_has_properties_that_are_not_named(walker: Walker, name: str) -> None:
    text = msgspec.json.encode(NESTED[name])
    tool = CallableTool("f", msgspec.json.decode(text))
    closed = json.loads(
        text, object_hook=lambda each: each | {"additionalProperties": "properties" not in each}
    )
    for seed in SEEDS:
        walk = walker.walk("tool_calls", rules(tool, required=True, single=True), metadata="f", seed=seed)
        if walk.ended:
            jsonschema.validate(read(walker, walk.text), closed)


def test_schemas_that_are_combined_see_each_others_properties(tokenizers: dict[str, Tokenizer]) -> None:
    walker = Walker(tokenizers["glm4"], "glm4")
    both = {"allOf": [obj(x={"type": "boolean"}), obj(y={"type": "null"})]}
    tool = CallableTool("f", obj(a=both))
    walks = (
        walker.walk("tool_calls", rules(tool, required=True, single=True), metadata="f", seed=seed)
        for seed in SEEDS
    )
    read_ones = [read(walker, walk.text)["a"] for walk in walks if walk.ended]
    assert read_ones
    for value in read_ones:
        jsonschema.validate(value, both)


def test_masks_look_ahead_to_the_next_call_and_not_beyond(walker: Walker) -> None:
    tools = [CallableTool(name, obj(city={"type": "boolean"}), strict=True) for name in ("get_a", "get_b")]
    forced = sum(
        walker.look_ahead(Grammar("tool_calls", rules(*tools, required=True)), seed) for seed in range(4)
    )
    assert forced > 20


def test_masks_of_calls_and_of_texts_are_filled_at_once(walker: Walker) -> None:
    """Different ids may be part of them."""
    calls = rules(CallableTool("f", obj(a={"type": "integer"})))
    grammars = [Grammar("tool_calls", calls), Grammar("json_object"), Grammar("tool_calls", calls)]
    masks = [walker.grammars.compile(each).mask() for each in grammars]
    words = Words(walker.tokenizer.size, 3)
    assert GrammarMask.fill_all(masks, words, [0, 1, 2]) == [None] * 3
    for mask, row in zip(masks, words.array, strict=True):
        alone = Words(walker.tokenizer.size)
        mask.fill(alone)
        assert np.array_equal(row, alone.array)


def test_required_calls_name_their_tools(walker: Walker) -> None:
    tools = [
        CallableTool("get_a", obj(a={"type": "boolean"})),
        CallableTool("get_b", obj(b={"type": "null"})),
    ]
    counts = set()
    for seed in range(30):
        walk = walker.walk("tool_calls", rules(*tools, required=True), seed=seed)
        if not walk.ended:
            continue
        for segment in segments(walk):
            name, _, content = segment.partition("\n")
            assert set(read(walker, content)) == {{"get_a": "a", "get_b": "b"}[name]}
        counts.add(len(segments(walk)))
    assert len(counts) > 1


def test_one_call_is_one_call_and_text_may_come_before(walker: Walker) -> None:
    tool = CallableTool("get_a", obj(a={"type": "boolean"}), strict=True)
    kinds = set()
    for seed in range(40):
        walk = walker.walk("tool_calls", rules(tool, single=True), seed=seed, steps=120)
        if not walk.ended:
            continue
        called = [each.startswith("get_a\n") for each in segments(walk)]
        assert called in ([False], [True], [False, True])
        kinds.add(tuple(called))
    assert (False,) in kinds
    assert (True,) in kinds


CHAIN = {f"d{at}": {"properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(3000)}

TEXTS = {
    "json_schema": Grammar("json_schema", json.dumps(obj(x={"type": "integer", "minimum": 0, "maximum": 9}))),
    "json_object": Grammar("json_object"),
    "regex": Grammar("regex", r" ?\{[0-9]\}"),
    "choice": Grammar("choice", '["{1}", "{2}"]'),
    "lark": Grammar("lark", 'start: call+\ncall: "{" /[0-9]/ "}"'),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_an_answer_is_calls_or_text_that_obeys(walker: Walker, kind: str) -> None:
    tools = [CallableTool("get_a", obj(a={"type": "boolean"}), strict=True), CallableTool("get_b")]
    said: Counter[str] = Counter()
    for seed in range(30):
        walk = walker.walk("tool_calls", rules(*tools, text=TEXTS[kind]), seed=seed, steps=150)
        if not walk.ended:
            continue
        name, _, first = segments(walk)[0].partition("\n")
        said[name] += 1
        if name:
            assert all(each.startswith(("get_a\n", "get_b\n")) for each in segments(walk))
        elif kind == "json_schema":
            jsonschema.validate(json.loads(first), json.loads(TEXTS[kind].text))
        elif kind == "json_object":
            assert isinstance(json.loads(first), dict)
        else:
            assert re.fullmatch(r" ?(\{[0-9]\})+", first)
        assert name or len(segments(walk)) == 1
    assert said[""]
    assert said["get_a"]


@pytest.mark.parametrize(
    "text",
    [
        Grammar("json_schema", '{"not": {}}'),
        Grammar("json_schema", '{"type": "string", "format": "nope"}'),
        Grammar("json_schema", "{"),
        Grammar("regex", "("),
        Grammar("regex", "a(?=b)"),
        Grammar("choice", "[]"),
        Grammar("lark", "start: nobody"),
        Grammar("lark", "start: ("),
        Grammar("lark", "root ::= ("),
        Grammar("tool_calls", "{}"),
    ],
)
def test_text_that_cannot_be_held_to_its_grammar_is_refused(walker: Walker, text: Grammar) -> None:
    with pytest.raises(InvalidGrammarError) as refused:
        walker.grammars.compile(Grammar("tool_calls", rules(CallableTool("f", obj(a={})), text=text)))
    assert part_at_fault(str(refused.value)) == TEXT_PART, str(refused.value)


def test_what_is_too_large_to_go_on_with_is_refused(walker: Walker) -> None:
    large = obj([], **{f"p{at}": {"type": "null"} for at in range(1200)})
    for tools, metadata, at_fault in (
        (rules(CallableTool("g"), CallableTool("f", large), required=True), None, Part("f")),
        (rules(CallableTool("f", obj(a=large)), required=True), "f", Part("f")),
        (rules(CallableTool("f"), text=Grammar("json_schema", json.dumps(large))), None, TEXT_PART),
    ):
        with pytest.raises(InvalidGrammarError, match="left out") as refused:
            walker.grammars.compile(Grammar("tool_calls", tools), metadata=metadata)
        assert part_at_fault(str(refused.value)) == at_fault


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (obj(a={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (obj(a={"not": {}}), "not"),
        (obj(a={"type": "string", "pattern": "a(?=b)"}), r"parameters\.properties\.a|parameters\.a"),
        (obj(a={"anyOf": [{"pattern": r"\ba\b"}, {"type": "null"}]}), "a"),
        (obj(a={"type": ["integer", "null"], "minimum": -(2**63)}), "minimum|integer range"),
        (obj(a={"type": "string", "format": "colour"}), "colour|format"),
        (obj(a={"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "oneOf"),
        ({**obj(a={}), "if": {}}, "if"),
        (obj(a={"propertyNames": {"maxLength": 3}}), "propertyNames"),
        (obj(a={"type": "object", "minProperties": 2}), "minProperties"),
        (obj(a={"$ref": "#/$defs/gone", "description": "A"}), "gone"),
        (obj(a={"type": "array", "items": {"$ref": "#/components/schemas/X"}}), "schemas/X"),
    ],
)
def test_what_cannot_be_enforced_is_refused_for_strict_tools_and_left_out_for_others(
    walker: Walker, schema: dict[str, Any], why: str
) -> None:
    strict, loose = CallableTool("f", schema, strict=True), CallableTool("f", schema)
    other = CallableTool("other", obj(a={}), strict=True)
    with pytest.raises(InvalidGrammarError, match=why) as refused:
        walker.grammars.compile(Grammar("tool_calls", rules(other, strict, other)))
    assert part_at_fault(str(refused.value)) == Part("f")
    walk = walker.walk("tool_calls", rules(loose, required=True, single=True), metadata="f", seed=2)
    assert not walk.ended or "a" in read(walker, walk.text)


PET: dict[str, Any] = {
    "oneOf": [{"$ref": "#/$defs/cat", "x-foo": 1}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
}
ANNOTATED = {
    **obj(
        pet=PET,
        named={"type": "string", "maxLength": 3, "widget": "text", "x-order": {"not": {}}},
        one={"enum": ["a", "b"], "enumDescriptions": ["", ""]},
        maybe={"anyOf": [{"type": "boolean"}, {"type": "null"}], "nullable": True},
        anything={"x-foo": None},
    ),
    "x-foo": [],
    "$defs": {
        name: obj(kind={"const": name}, days={"type": "integer", "maximum": 9, "contentEncoding": "x"})
        for name in ("cat", "dog")
    },
}


def test_what_no_draft_knows_is_an_annotation(walker: Walker) -> None:
    tool = CallableTool("f", ANNOTATED, strict=True)
    walker.grammars.compile(Grammar("json_schema", json.dumps(ANNOTATED)))
    ended = 0
    for seed in SEEDS:
        walk = walker.walk("tool_calls", rules(tool, required=True, single=True), metadata="f", seed=seed)
        if walk.ended:
            ended += 1
            jsonschema.validate(read(walker, walk.text), ANNOTATED)
    assert ended > len(SEEDS) / 3


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_what_a_draft_knows_is_enforced_or_refused(walker: Walker, keyword: str) -> None:
    value = UNENFORCED[keyword]
    schemas = [{keyword: value}, {"type": "object", keyword: value}, {"enum": [["a"]], keyword: value}]
    if keyword == "uniqueItems":
        schemas[0] = {"type": "array", keyword: value}
    for schema in schemas:
        parameters = obj(a=schema)
        strict = rules(CallableTool("f", parameters, strict=True))
        with pytest.raises(InvalidGrammarError, match=re.escape(keyword)):
            walker.grammars.compile(Grammar("tool_calls", strict))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        rules(CallableTool("f", {"type": "string"}, strict=True)),
        rules(CallableTool("f", obj(a={"type": "strin"}), strict=True)),
        rules(CallableTool("f", obj(a={"$ref": "#/nowhere"}), strict=True)),
        rules(CallableTool("f", obj(a={"type": "array", "minItems": 3, "maxItems": 1}), strict=True)),
        rules(CallableTool("f", {**obj(a={"$ref": "#/$defs/d0"}), "$defs": CHAIN}, strict=True)),
    ],
)
def test_what_is_no_tool_is_refused(walker: Walker, text: str) -> None:
    with pytest.raises(InvalidGrammarError):
        walker.grammars.compile(Grammar("tool_calls", text))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"properties": {}, "minProperties": 1, "additionalProperties": False}, "minProperties"),
        (obj(a={"properties": {}, "minProperties": 1, "additionalProperties": False}), "minProperties"),
        (obj(a={"prefixItems": [True], "items": False, "minItems": 2}), "minItems"),
        (obj(a={"type": "string", "minLength": 4, "maxLength": 3}), "maxLength contradicts minLength"),
        ({"$ref": "#/$defs/x", "required": ["a"], "$defs": {"x": {"type": "object"}}}, "beside"),
        ({**obj(a={"$ref": "#x"}), "$defs": {"y": {"$anchor": "x"}}}, "leads nowhere"),
    ],
)
def test_what_python_literals_cannot_hold_to_is_refused(
    tokenizers: dict[str, Tokenizer], schema: dict[str, Any], why: str
) -> None:
    walker = Walker(tokenizers["chatglm3"], "chatglm3")
    with pytest.raises(InvalidGrammarError, match=why):
        walker.grammars.compile(Grammar("tool_calls", rules(CallableTool("f", schema, strict=True))))


def test_arguments_that_must_not_be_empty_are_not(tokenizers: dict[str, Tokenizer]) -> None:
    walker = Walker(tokenizers["chatglm3"], "chatglm3")
    schema = {"additionalProperties": {"type": "null"}, "minProperties": 1}
    text = rules(CallableTool("f", schema, strict=True), required=True, single=True)
    for seed in SEEDS:
        walk = walker.walk("tool_calls", text, metadata="f", seed=seed, steps=100)
        assert not walk.ended or read(walker, walk.text)


def test_a_format_without_tools_has_no_calls(tokenizers: dict[str, Tokenizer]) -> None:
    chatglm2 = Walker(tokenizers["chatglm2"], "chatglm2")
    with pytest.raises(InvalidGrammarError, match="format"):
        chatglm2.grammars.compile(Grammar("tool_calls", rules(CallableTool("f"))))


def test_both_quotes_are_python(tokenizers: dict[str, Tokenizer]) -> None:
    walker = Walker(tokenizers["chatglm3"], "chatglm3")
    tool = CallableTool("f", obj(a={"type": "string", "maxLength": 6}))
    said = [
        walker.walk("tool_calls", rules(tool, required=True), metadata="f", seed=seed).text
        for seed in range(20)
    ]
    assert {re.search("a=(.)", each).group(1) for each in said} == {"'", '"'}


def test_a_fault_is_that_of_the_part_that_fails_alone(walker: Walker) -> None:
    tool = CallableTool("f", obj(a={"type": "boolean"}))
    with pytest.raises(InvalidGrammarError, match=r'^text: line 1: .*"nobody"'):
        walker.grammars.compile(
            Grammar("tool_calls", rules(tool, text=Grammar("lark", "start: nobody"))), metadata="f"
        )
    with pytest.raises(InvalidGrammarError, match=r"^the answer begins as the call of none"):
        walker.grammars.compile(Grammar("tool_calls", rules(tool)), metadata="g")
