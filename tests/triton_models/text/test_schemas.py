import json
from collections import Counter
from typing import Any

import pytest

from tests.triton_models.text.walks import Walker
from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import text_rule
from triton_models.text.schemas import (
    OPTIONAL,
    PROPERTIES,
    VALUES,
    check_schema,
    check_size,
    rewrite,
    simplify,
)
from triton_models.text.tokenizers import Tokenizer, ids_within
from wire.grammar import Grammar

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"properties": []}, "properties"),
    ({"properties": None}, "properties"),
    ({"properties": {"k": 5}}, "properties"),
    ({"required": None}, "required"),
    ({"required": [{}]}, "required"),
    ({"minProperties": "x"}, "minProperties"),
    ({"maxProperties": None}, "maxProperties"),
    ({"type": ["string", {}]}, "type"),
    ({"type": None}, "type"),
    ({"type": []}, "type"),
    ({"$ref": []}, r"\$ref"),
    ({"enum": 5}, "enum"),
    ({"enum": []}, "enum"),
    ({"oneOf": [{"type": "object", "required": ["k"], "properties": {"k": {"enum": 5}}}, {}]}, "enum"),
    ({"anyOf": {}}, "anyOf"),
    ({"type": "array", "minItems": "1"}, "minItems"),
    ({"type": "array", "maxItems": -1}, "maxItems"),
    ({"type": "array", "prefixItems": 3}, "prefixItems"),
    ({"type": "array", "items": 5}, "items"),
    ({"type": "string", "minLength": True}, "minLength"),
    ({"type": "string", "maxLength": None}, "maxLength"),
    ({"type": "string", "pattern": 5}, "pattern"),
    ({"type": "integer", "maximum": "9"}, "maximum"),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"type": "number", "multipleOf": 0}, "multipleOf"),
]


@pytest.fixture(scope="module", params=["chatglm3", "glm4"])
def walker(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Walker:
    return Walker(tokenizers[request.param], request.param)


def tool(parameters: dict[str, Any], *, strict: bool) -> Grammar:
    tools = [{"name": "f", "parameters": parameters, "strict": strict}]
    return Grammar("tool_calls", json.dumps({"tools": tools, "required": True}))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schema", "keyword"), BROKEN)
def test_a_keyword_with_a_value_that_it_cannot_have_is_named(
    walker: Walker, schema: dict[str, Any], keyword: str, strict: bool
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidGrammarError, match=rf"f: parameters\.properties\.a.*\.{keyword}.*: "):
        walker.grammars.compile(tool(parameters, strict=strict))
    with pytest.raises(InvalidGrammarError, match=rf"\$\.properties\.a.*\.{keyword}.*: "):
        walker.grammars.compile(Grammar("json_schema", json.dumps(parameters)))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}},
        {"items": {"$ref": "#/elsewhere"}, "elsewhere": {"oneOf": [{"$ref": "#/elsewhere"}]}},
    ],
)
def test_a_schema_that_is_only_itself_again_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrammarError, match="back to itself"):
        check_schema(schema, strict=False)


def test_a_reference_leads_to_a_schema() -> None:
    with pytest.raises(InvalidGrammarError, match=r"^\$\.items\.\$ref leads to no schema"):
        check_schema({"items": {"$ref": "#/elsewhere"}, "elsewhere": 5}, strict=False)


def test_properties_that_are_required_make_up_the_least_number() -> None:
    schema = {"required": ["a", "b"], "minProperties": 2}
    check_schema(schema, strict=True)
    with pytest.raises(InvalidGrammarError, match=r"^\$: minProperties"):
        check_schema(schema | {"minProperties": 3}, strict=True)


def test_a_definition_without_a_reference_need_not_be_enforced() -> None:
    definitions: dict[str, Any] = {"old": {"divisibleBy": 2}}
    check_schema({"$defs": definitions}, strict=True)
    used = {"properties": {"a": {"$ref": "#/$defs/old"}}}
    for schema in ({**used, "$defs": definitions}, {"$defs": definitions, **used}):
        with pytest.raises(InvalidGrammarError, match=r"^#/\$defs/old: the keyword divisibleBy"):
            check_schema(schema, strict=True)
    for reference in ("#anchor", "http://example.com/a"):
        schema = {"items": {"$ref": reference}, "$defs": definitions}
        with pytest.raises(InvalidGrammarError, match=r"^\$\.\$defs\.old: the keyword divisibleBy"):
            check_schema(schema, strict=True)
    with pytest.raises(InvalidGrammarError, match=r"^#/\$defs/an%20old: the keyword divisibleBy"):
        check_schema({"$ref": "#/$defs/an%20old", "$defs": {"an old": definitions["old"]}}, strict=True)
    check_schema({"$defs": {"old": {"minLength": "1"}}}, strict=True)


def test_what_a_reference_leads_to_is_looked_at() -> None:
    with pytest.raises(InvalidGrammarError, match=r"#/elsewhere\.enum: Expected `array`, got `null`"):
        check_schema({"$ref": "#/elsewhere", "elsewhere": {"enum": None}}, strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"items": {"$ref": "#"}},
        {"properties": {"required": {"type": "null"}, "enum": True}},
        {"const": {"enum": 5}, "default": {"type": 7}, "enum": [{"required": 1}]},
        {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": ["null"]}}},
        {"$ref": "#/nowhere"},
        {"items": [{}, True], "minItems": 0, "multipleOf": 0.5},
    ],
)
def test_what_can_be_a_schema_passes(schema: Any) -> None:
    check_schema(schema, strict=False)


@pytest.mark.parametrize(
    "names",
    [
        True,
        {},
        {"type": "string"},
        {"type": ["string", "null"], "title": "Name"},
        {"$ref": "#/$defs/any"},
        {"$ref": "#/$defs/same", "description": "of a city"},
    ],
)
def test_names_of_properties_may_be_called_any(names: Any) -> None:
    definitions = {"any": {"type": "string", "description": "any"}, "same": {"$ref": "#/$defs/any"}}
    record = {"type": "object", "propertyNames": names}
    schema = {"items": record | {"additionalProperties": record.copy()}, "$defs": definitions}
    simplify(schema, Counter())
    record = {"type": "object"}
    assert schema == {"items": record | {"additionalProperties": record}, "$defs": definitions}


@pytest.mark.parametrize(
    "names",
    [
        False,
        {"type": "integer"},
        {"pattern": "^a"},
        {"enum": ["a"], "const": "a"},
        {"enum": [f"n{at}" for at in range(OPTIONAL + 1)]},
        {"type": "string", "maxLength": 3},
        {"not": {}},
        {"$ref": "#/$defs/short"},
        {"$ref": "#anchor"},
    ],
)
def test_names_of_properties_that_are_restricted_stay_so(names: Any) -> None:
    schema = {"propertyNames": names, "$defs": {"short": {"maxLength": 3}}}
    simplify(schema, Counter())
    assert schema == {"propertyNames": names, "$defs": {"short": {"maxLength": 3}}}


@pytest.mark.parametrize(
    "names", [{"enum": ["a", "b", 5], "type": "string"}, {"$ref": "#/$defs/ab"}, {"const": "a"}]
)
def test_names_of_properties_that_are_listed_become_properties(names: Any) -> None:
    definitions: dict[str, Any] = {"ab": {"enum": ["a", "b"]}}
    properties = {"a": {"type": "null"}, "c": {}}
    schema = {"propertyNames": names, "properties": properties, "additionalProperties": {"const": 1}}
    size = Counter[str]()
    simplify(each := schema | {"$defs": definitions.copy()}, size)
    b = {} if "const" in names else {"b": {"$ref": "#/$defs/additionalProperties-1"}}
    assert each == {
        "properties": {"a": {"type": "null"}, **b},
        "additionalProperties": False,
        "$defs": definitions | {"additionalProperties-1": {"const": 1}},
    }
    assert size["properties"] >= len(each["properties"])
    patterns: dict[str, Any] = {"propertyNames": {"const": "a"}, "patternProperties": {"^b": {}}}
    simplify(same := patterns.copy(), Counter())
    assert same == patterns


def test_a_property_or_a_constant_may_have_the_name_of_a_keyword() -> None:
    schema: dict[str, Any] = {
        "properties": {"propertyNames": {}, "$schema": {}, "additionalItems": {}},
        "required": ["propertyNames"],
        "enum": [{"propertyNames": True}],
        "default": {"propertyNames": {}},
    }
    same = json.loads(json.dumps(schema))
    simplify(schema, Counter())
    assert schema == same


@pytest.mark.parametrize(
    ("pattern", "rewritten", "other"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?0*\d*\.?\d*$", "[^-+.]"),
        (r"^(?![\]a]*$)\w", r"^\w", r"[^\]a]"),
        (r"^(?!^[^a]*$)b", None, None),
        (r"^(?!^[-+.]*$)a|b", None, None),
        (r"^(?!^[-+.]+$)a", None, None),
        (r"a(?!^[-+.]*$)", None, None),
    ],
)
def test_a_pattern_that_looks_ahead_at_its_beginning_alone_is_rewritten(
    pattern: str, rewritten: str | None, other: str | None
) -> None:
    same = {"type": "string", "pattern": pattern}
    schema: dict[str, Any] = {"items": [same.copy()], "enum": [same]}
    rewrite(schema)
    told = same if other is None else {**same, "pattern": rewritten, "allOf": [{"pattern": other}]}
    assert schema == {"items": [told], "enum": [same]}


@pytest.mark.parametrize(
    ("schema", "value", "allowed"),
    [
        ({"format": "time"}, "10:10:59.5Z", True),
        ({"format": "time"}, "10:10:60Z", False),
        ({"format": "time", "type": ["string", "null"]}, None, True),
        ({"format": "date-time"}, "2024-02-29T23:59:59+08:00", True),
        ({"format": "date-time"}, "2024-02-29T23:59:60Z", False),
        ({"format": "date-time"}, "2023-02-29T23:59:59Z", False),
        *(({"format": "date"}, f"{year}-02-29", True) for year in ("2024", "2000", "0004", "1996")),
        *(({"format": "date"}, f"{year}-02-29", False) for year in ("2023", "1900", "0000", "1998")),
        *(({"format": "date"}, f"2023-{day}", True) for day in ("02-28", "02-19", "01-29", "12-29", "03-30")),
        ({"format": "date"}, "0000-01-01", False),
        ({"format": "hostname"}, ".".join(["a" * 49] * 5) + ".com", True),
        ({"format": "hostname"}, ".".join(["a" * 49] * 5) + ".info", False),
        ({"minimum": 2**53 + 1}, 2**53 + 1, False),  # but no smaller one is
        ({"minimum": 2**53 + 1}, 2**53, False),
        ({"minimum": 2**53 + 1}, 2**53 + 2, True),
        ({"maximum": 2**63 - 1}, 2**63, False),
        ({"maximum": 2**63 - 1}, 2**63 - 1024, True),
        ({"exclusiveMaximum": 2**63}, 2**63, False),
        ({"exclusiveMinimum": -(2**53) - 2}, -(2**53) - 2, False),
        ({"exclusiveMinimum": -(2**53) - 2}, -(2**53) + 1, True),
    ],
)
def test_what_validators_refuse_is_not_allowed(
    walker: Walker, schema: dict[str, Any], value: Any, allowed: bool
) -> None:
    schema = {"type": "string" if "format" in schema else "integer", **schema}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    said = said_in_call = json.dumps({"a": value})
    if walker.format.name == "chatglm3":
        said_in_call = f"```python\ntool_call(a={'None' if value is None else json.dumps(value)})"
    for grammar, text in (
        (Grammar("json_schema", json.dumps(parameters)), said),
        (tool(parameters, strict=True), f"f\n{said_in_call}"),
    ):
        ids = walker.tokenizer.encode(text)
        assert (walker.grammars.compile(grammar).mask().takes(ids) == len(ids)) is allowed


@pytest.mark.parametrize("bound", [1e308, -1e308, 10**30, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("keyword", ["minimum", "maximum"])
def test_a_bound_may_be_more_than_64_bits_hold(
    tokenizers: dict[str, Tokenizer], keyword: str, bound: float
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "number", keyword: bound}}}
    walk = Walker(tokenizers["chatglm3"], "chatglm3").walk("tool_calls", tool(parameters, strict=False).text)
    assert walk.ids


def test_properties_are_counted_before_anything_is_compiled() -> None:
    names = [f"p{at}" for at in range(PROPERTIES)]
    properties: dict[str, Any] = {name: {"type": "null"} for name in names}
    check_size(check_schema({"properties": properties, "required": names[OPTIONAL:]}, strict=False))
    with pytest.raises(InvalidGrammarError, match=r"^\$\.items: over 500 properties"):
        check_schema({"items": {"properties": properties, "required": names[OPTIONAL + 1 :]}}, strict=False)
    more = {"properties": {**properties, "one": True}, "required": names}
    with pytest.raises(InvalidGrammarError, match="over 5000 properties"):
        check_size(check_schema(more, strict=False))
    with pytest.raises(InvalidGrammarError, match="over 5000 properties"):
        text_rule(Grammar("json_schema", json.dumps(more)))


def test_branches_that_may_overlap_are_found(walker: Walker) -> None:
    overlap = {"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}
    good = {"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}
    schema = {
        "prefixItems": [good, {"oneOf": [{"type": "null"}, {"type": "string"}]}],
        "$defs": {"a": overlap},
    }
    with pytest.raises(InvalidGrammarError, match=r"^#/\$defs/a\.items: branches of oneOf .*; use anyOf$"):
        walker.grammars.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("name", ["城市", "A b", "List<Foo>", "Resp[int]", "A`1", "50%", "a/b", "a~b", "a'b"])
def test_definitions_may_have_any_name(walker: Walker, name: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    schema = {
        "$id": "Output Format",
        "properties": {"x": {"$ref": f"#/$defs/{pointer}"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {name: {"$id": f"of {name}", "const": 1}},
    }
    assert json.loads(walker.walk("json_schema", json.dumps({"type": "object", **schema})).text) == {"x": 1}


@pytest.mark.parametrize("more", [{}, {"additionalProperties": {"type": "null"}}])
@pytest.mark.parametrize("named", ["properties", "patternProperties"])
def test_a_property_has_one_spelling(walker: Walker, named: str, more: dict[str, Any]) -> None:
    schema = {"type": "object", named: {"a": {"type": "boolean"}}, **more}
    mask = walker.grammars.compile(Grammar("json_schema", json.dumps(schema)), continues=True).mask()
    for text, right in (('{"a": true', True), ('{"b": null', True), ('{"\\u0061": null', False)):
        ids = ids_within(walker.tokenizer, text)
        assert (mask.takes(ids) == len(ids)) == right, text


def test_an_id_that_a_reference_starts_from_stays() -> None:
    inner = {"$id": "https://example.com/inner", "type": "null"}
    schema = {"$ref": "https://example.com/inner", "$defs": {"inner": inner}}
    simplify(schema, check_schema(schema, strict=False))
    assert schema["$defs"] == {"inner": inner}


def test_listed_names_count_as_properties() -> None:
    names = {"enum": [f"p{at}" for at in range(OPTIONAL)]}
    records = [{"propertyNames": {"$ref": "#/$defs/names"}} for _ in range(PROPERTIES // OPTIONAL + 1)]
    schema = {"prefixItems": records, "$defs": {"names": names}}
    with pytest.raises(InvalidGrammarError, match="over 5000 properties"):
        text_rule(Grammar("json_schema", json.dumps(schema)))


def test_listed_names_may_nest(walker: Walker) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(6):
        schema = {"type": "object", "propertyNames": {"enum": [*"abcdefgh"]}, "additionalProperties": schema}
    assert len(text_rule(Grammar("json_schema", json.dumps(schema))).body) < 5000
    walker.grammars.compile(tool(schema, strict=True))


def test_properties_of_all_tools_count_together(walker: Walker) -> None:
    def tools(count: int, schema: Any) -> Grammar:
        parameters = {"type": "object", "properties": schema}
        each = [{"name": f"f{at}", "parameters": parameters, "strict": True} for at in range(count)]
        return Grammar("tool_calls", json.dumps({"tools": each, "required": True}))

    many = dict.fromkeys((f"p{at}" for at in range(OPTIONAL)), True)
    walker.grammars.compile(tools(PROPERTIES // OPTIONAL, many))
    with pytest.raises(InvalidGrammarError, match=r"^over 5000 properties"):
        walker.grammars.compile(tools(PROPERTIES // OPTIONAL + 1, many))
    half = {"a": {"enum": list(range(VALUES // 2))}}
    walker.grammars.compile(tools(2, half))
    with pytest.raises(InvalidGrammarError, match=r"^over 10000 values"):
        walker.grammars.compile(tools(3, half))
    with pytest.raises(InvalidGrammarError, match=r"^tool f0: over 10000 values"):
        walker.grammars.compile(tools(1, {"a": {"enum": list(range(VALUES + 1))}}))
