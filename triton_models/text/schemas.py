"""Checks JSON schemas before anything is compiled: each keyword's value, what would be ignored, and the size.

llguidance refuses most of what it cannot enforce, and names the keyword, but never its place. Some invalid
values, older keywords and endless references it accepts and ignores. A metaschema would find them, but takes
the interpreter for a second where a schema is large.

And drops what llguidance refuses though it restricts nothing, and rewrites what it takes in other words.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import quote, unquote

import msgspec

from triton_models.errors import InvalidGrammarError
from wire.grammar import RESTRICTIONS

OPTIONAL: Final = 500
"""Most optional properties of one object. At each of them, all the following ones are possible next, so that
masks become too expensive with a few hundred more."""

PROPERTIES: Final = 5_000
"""Most properties in a schema, and in the schemas of all tools together: the time to compile them grows
faster than their number."""

VALUES: Final = 10_000
"""Most enumerated values in the schemas of all tools: they take half a second in Python's notation."""

_FORMATS: Final = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Those of strings that llguidance enforces."""

_Schema = dict[str, Any] | bool
_Schemas = Annotated[list[_Schema], msgspec.Meta(min_length=1)]
_Named = dict[str, _Schema]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Type = Literal["object", "array", "string", "integer", "number", "boolean", "null"]


class _Keywords(msgspec.Struct, rename="camel"):
    """The keywords that grammars use: draft 2020-12, and the older form of `items` as a list."""

    type: _Type | Annotated[list[_Type], msgspec.Meta(min_length=1)] = []
    enum: Annotated[list[Any], msgspec.Meta(min_length=1)] = []
    ref: str = msgspec.field(name="$ref", default="")
    defs: _Named = msgspec.field(name="$defs", default={})
    definitions: _Named = {}
    any_of: _Schemas = []
    one_of: _Schemas = []
    all_of: _Schemas = []
    not_: _Schema = msgspec.field(name="not", default=True)
    if_: _Schema = msgspec.field(name="if", default=True)
    then: _Schema = True
    else_: _Schema = msgspec.field(name="else", default=True)
    properties: _Named = {}
    pattern_properties: _Named = {}
    additional_properties: _Schema = True
    property_names: _Schema = True
    required: list[str] = []
    min_properties: _Count = 0
    max_properties: _Count = 0
    items: _Schema | list[_Schema] = True
    additional_items: _Schema = True
    prefix_items: list[_Schema] = []
    contains: _Schema = True
    min_items: _Count = 0
    max_items: _Count = 0
    pattern: str = ""
    format: str = ""
    min_length: _Count = 0
    max_length: _Count = 0
    minimum: float = 0
    maximum: float = 0
    exclusive_minimum: float = 0
    exclusive_maximum: float = 0
    multiple_of: Annotated[float, msgspec.Meta(gt=0)] = 1


_IN_PLACE: Final = ("anyOf", "oneOf", "allOf")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS: Final = _MAPS[2:]
_ENFORCED: Final = (*_MAPS[:2], *_IN_PLACE, "prefixItems", "items", "additionalProperties")
_IN_USE: Final = (*_ENFORCED, "additionalItems", "propertyNames", "contains", "not", "if", "then", "else")
"""The keywords whose values are schemas, lists of schemas, or maps; llguidance refuses or ignores the later
ones."""

_OLD: Final = (
    *("extends", "disallow", "divisibleBy", "requires", "maxDecimal"),
    *("minimumCanEqual", "maximumCanEqual"),
)
"""Keywords of older drafts, which llguidance ignores."""

_IN_FRAGMENTS: Final = "~!$&'()*+,;=:@?"
"""What stands for itself in a URI's fragment, beside letters, digits and `_.-` (RFC 3986, 3.5)."""
_OLD_ITEM: Final = re.compile(r"/items/(?=\d+(?:/|\Z))")
"""Where a reference leads into a list of `items`."""

_EXACT: Final = 2**53
_INWARD: Final[Mapping[str, tuple[float, Callable[[float, float], bool]]]] = {
    "minimum": (math.inf, operator.lt),
    "exclusiveMinimum": (math.inf, operator.le),
    "maximum": (-math.inf, operator.gt),
    "exclusiveMaximum": (-math.inf, operator.ge),
}
"""Where the values within a bound are, and whether a number is beyond it. llguidance computes with floats, so
that beyond `_EXACT` an exclusive bound is among the values."""

_LIMITS: Final = {"properties": PROPERTIES, "values in enumerations": VALUES}


def check_size(size: Mapping[str, int]) -> None:
    """Check that schemas are not too large to be enforced.

    Args:
        size: as `check_schema` returns it, of one schema or added up.

    Raises:
        InvalidGrammarError: they are too large.
    """
    for name, count in size.items():
        if count > _LIMITS[name]:
            raise InvalidGrammarError(f"over {_LIMITS[name]} {name} in its schemas")


def check_schema(schema: Any, path: str = "$", *, strict: bool) -> Counter[str]:
    """Check that every keyword has a valid value within bounds, and that no schema refers only to itself.

    With `strict`, also check that nothing would be ignored that llguidance does not refuse by itself.

    Returns:
        The numbers of properties and of values in enumerations.

    Raises:
        InvalidGrammarError: the schema fails a check; the message names the place, and the keyword if one is
            at fault.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidGrammarError("a JSON schema is an object")
    size = Counter[str]()
    same_value: dict[int, list[int]] = {}
    for where, each in reachable(schema, path):
        try:
            keywords = msgspec.convert(each, _Keywords)
        except msgspec.ValidationError as error:
            what, _, keyword = str(error).partition(" - at `$")
            what = what.replace("Invalid enum value", f"Expected one of {', '.join(get_args(_Type))}, got")
            raise _fault(where, f"{keyword.rstrip('`')}: {what[:150]}") from None
        if len(keywords.properties.keys() - keywords.required) > OPTIONAL:
            raise _fault(where, f": over {OPTIONAL} properties may be left out of an object")
        if strict:
            _check_enforced(each, keywords, where)
        size["properties"] += len(keywords.properties)
        size["values in enumerations"] += len(keywords.enum)
        parts = [part for keyword in _IN_PLACE for part in each.get(keyword, ())]
        if (referred := _referred(schema, each)) is not None:
            if not isinstance(referred, dict | bool):
                raise _fault(where, ".$ref leads to no schema")
            parts.append(referred)
        same_value[id(each)] = [id(part) for part in parts if isinstance(part, dict)]
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        raise _fault(path, ": a $ref leads back to itself, with no object or array between") from None
    return size


def simplify(schema: Any, size: Counter[str]) -> None:
    """Write a schema that passed `check_schema` in fewer keywords of the same meaning, for all grammars.

    A list of `items` with `additionalItems`, as draft 7 has it, becomes `prefixItems` with `items`, which
    llguidance ignores where `$schema` says draft 7. Without a list, `additionalItems` has no meaning.

    References are written as URIs, which names of definitions need not be ("#/$defs/List[int]"). An `$id`,
    which need not be one either, is dropped where no reference starts from it.

    A `propertyNames` that every name conforms to is dropped: zod writes one for each record, and llguidance
    refuses the keyword, whatever its value is. One that lists names becomes their `properties`. Dropped is a
    `format` of what is no string, and an unknown one whose meaning a `pattern` tells, as in zod. A bound that
    llguidance would round becomes narrower.

    Args:
        schema: it is changed in place.
        size: what `check_schema` returned, to which properties are added.

    Raises:
        InvalidGrammarError: it is too large.
    """
    within = all(each.get("$ref", "#").startswith("#") for _, each in reachable(schema, "$"))
    for _, each in reachable(schema, "$"):
        each.pop("$schema", None)
        if within:
            each.pop("$id", None)
        more = each.pop("additionalItems", True)
        if isinstance(each.get("items"), list):
            each |= {"prefixItems": each["items"], "items": more}
        if "$ref" in each:
            parts = _OLD_ITEM.sub("/prefixItems/", each["$ref"]).split("/")
            each["$ref"] = "/".join(
                [parts[0], *(quote(unquote(part), safe=_IN_FRAGMENTS) for part in parts[1:])]
            )
        if "propertyNames" in each:
            size["properties"] += _simplify_names(schema, each)
            check_size({"properties": size["properties"]})
        for keyword, (inward, is_outside) in _INWARD.items():
            bound = each.get(keyword, 0)
            if abs(bound) > _EXACT and is_outside(float(bound), bound):
                each[keyword] = math.nextafter(bound, inward)
        if "format" in each and _tells_nothing(each):
            del each["format"]


_DATE: Final = (
    r"^0{0,3}[1-9]",
    r"^((..(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-|.{5}(0[^2]|1)|.{8}([013]|2[^9]))",
)
"""Of dates: the year is not 0; it is a leap year, or the month or the day is another than in February 29."""
_NOT_ALL_OF: Final = re.compile(r"\^\(\?!\^?\[((?:\\.|[^\]\[\\^])(?:\\.|[^\]\[\\])*)\]\*\$\)(?=[^|]*\Z)")
"""Begins a pattern for texts that are not of these characters alone; no alternative is without it."""


_NARROWER: Final[Mapping[str, tuple[str, ...]]] = {
    "date": _DATE,
    "date-time": (*_DATE, r"^.{17}[0-5]"),
    "time": (r"^.{6}[0-5]",),
    "hostname": (r"^.{1,253}$",),
}
"""Patterns of what validators take of some formats. llguidance allows February 29 and second 60 anywhere."""


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema`, not those within it, in other words where llguidance reads it wrongly or not at all.

    The pattern that it cannot read is the one for `Decimal` of pydantic up to 2.13: it has to have more than
    `[-+.]`.
    """
    patterns = [*_NARROWER.get(schema.get("format", ""), ())]
    if found := _NOT_ALL_OF.match(schema.get("pattern", "")):
        patterns.append(f"[^{found[1]}]")
        schema = schema | {"pattern": f"^{schema['pattern'][found.end() :]}"}
    parts = [*schema.get("allOf", ()), *({"pattern": each} for each in patterns)]
    return schema | {"allOf": parts} if patterns else schema


def rewrite(schema: Any) -> None:
    """Replace each schema in one that passed `check_schema` by itself as `rewritten`."""
    for _, each in reachable(schema, "$"):
        each.update(rewritten(each))


def _tells_nothing(schema: dict[str, Any]) -> bool:
    """Return whether the `format` of `schema` restricts nothing, or what a `pattern` does."""
    if "string" not in schema.get("type", "string"):
        return True
    parts = [each for each in (schema, *schema.get("allOf", ())) if isinstance(each, dict)]
    return schema["format"] not in _FORMATS and any("pattern" in each for each in parts)


def _simplify_names(schema: Any, each: dict[str, Any]) -> int:
    """Replace the `propertyNames` of `each`, within `schema`; return how many properties this adds."""
    names = each["propertyNames"]
    while isinstance(names, dict) and names.keys() & RESTRICTIONS == {"$ref"}:
        names = _referred(schema, names)
    names = {} if names is True else names
    if not isinstance(names, dict) or "string" not in names.get("type", "string"):
        return 0
    restrictions = names.keys() & RESTRICTIONS - {"type"}
    if not restrictions:
        del each["propertyNames"]
        return 0
    values = names.get("enum", [names.get("const")])
    if restrictions not in ({"enum"}, {"const"}) or len(values) > OPTIONAL or "patternProperties" in each:
        return 0
    del each["propertyNames"]
    named, more = each.get("properties", {}), each.get("additionalProperties", True)
    if isinstance(more, dict):
        # By reference: where one nests in another, it would be repeated for each name of both.
        definitions = schema.setdefault("$defs", {})
        definitions[key := f"additionalProperties-{len(definitions)}"] = more
        more = {"$ref": f"#/$defs/{key}"}
    each["properties"] = {name: named.get(name, more) for name in values if isinstance(name, str)}
    each["additionalProperties"] = False
    return len(values)


def target(schema: Any, pointer: str) -> Any:
    """Return what `pointer`, the value of a `$ref`, refers to within `schema`.

    Raises:
        LookupError: it refers to nothing, by name, or to another document.
    """
    document, *parts = pointer.split("/")
    if document != "#":
        raise LookupError(pointer)
    at = schema
    for part in parts:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(name)] if isinstance(at, list) else at[name]
        except (TypeError, ValueError):
            raise LookupError(pointer) from None
    return at


def reachable(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `schema`, the schemas in it and those that references lead to, but no booleans; each once.

    Definitions to which nothing refers change no answer, and are left out. A reference of a kind that only
    llguidance resolves may lead to any of them.
    """
    pending = [(path, schema)]
    seen = set()
    while pending:
        path, each = pending.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        pending += _parts(each, path, _IN_USE)
        if (referred := _referred(schema, each)) is not None:
            pending.append((each["$ref"], referred))
        elif "$ref" in each:
            pending += _parts(schema, "$", _DEFINITIONS)


def keywords_alone(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each of the `reachable` schemas asks for by itself: without the schemas in it."""
    for where, each in reachable(schema, path):
        alone = {name: each[name] for name in each.keys() & RESTRICTIONS - {*_ENFORCED, "$ref"}}
        if alone.keys() - {"type"}:
            yield where, alone


def _check_enforced(schema: dict[str, Any], keywords: _Keywords, where: str) -> None:
    for keyword in _OLD:
        if keyword in schema:
            raise _fault(where, f": the keyword {keyword} cannot be enforced")
    if keywords.prefix_items and isinstance(keywords.items, list):
        raise _fault(where, ": prefixItems beside a list of items cannot be enforced")
    values = (schema.get("const"), *keywords.enum)
    if any(isinstance(value, int) and abs(value) > _EXACT for value in values):
        raise _fault(where, ": an integer beyond 2^53 in const or enum cannot be enforced")
    if keywords.min_properties > max(1, len(set(keywords.required))):
        # A key that `properties` does not name may be generated twice, and then counts only once.
        raise _fault(where, ": minProperties over 1 cannot be enforced beyond the required properties")


def _fault(where: str, what: str) -> InvalidGrammarError:
    return InvalidGrammarError(f"{where[:200]}{what}")


def _parts(schema: dict[str, Any], path: str, keywords: Collection[str]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword not in keywords:
            continue
        within = f"{path}.{keyword}"
        if keyword in _MAPS:
            yield from ((f"{within}.{name}", part) for name, part in value.items())
        elif isinstance(value, list):
            yield from ((f"{within}.{at}", part) for at, part in enumerate(value))
        else:
            yield within, value


def _referred(schema: Any, each: dict[str, Any]) -> Any:
    """Return what the reference of `each` leads to; None: it has none, or only llguidance can follow it."""
    try:
        return target(schema, each["$ref"]) if "$ref" in each else None
    except LookupError:
        return None
