"""Checks JSON schemas before anything is compiled: each keyword's value, what would be ignored, and the size.

llguidance refuses most of what it cannot enforce, and names the keyword, but never its place. Some invalid
values, older keywords and endless references it accepts and ignores. A metaschema would find them, but takes
the interpreter for a second where a schema is large.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import unquote

import msgspec

from triton_models.errors import InvalidGrammarError

OPTIONAL: Final = 500
"""Most optional properties of one object. At each of them, all the following ones are possible next, so that
masks become too expensive with a few hundred more."""

PROPERTIES: Final = 5_000
"""Most properties in a schema, and in the schemas of all tools together: the time to compile them grows
faster than their number."""

VALUES: Final = 10_000
"""Most enumerated values in the schemas of all tools: they take half a second in Python's notation."""

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
_OF_ONE: Final = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_OF_LIST: Final = (*_IN_PLACE, "prefixItems", "items")
_OF_MAP: Final = ("properties", "patternProperties")
_DEFINITIONS: Final = ("$defs", "definitions")

_OLD: Final = ("additionalItems", "extends", "disallow", "divisibleBy")
"""Keywords of older drafts, which llguidance ignores."""


_LIMITS: Final = {"properties": PROPERTIES, "values in enumerations": VALUES}


def check_size(size: Mapping[str, int], what: str) -> None:
    """Check that a schema is not too large to be enforced; the error names it as `what`.

    Args:
        size: as `check_schema` returns it.
        what: the schema, or several whose sizes were added.

    Raises:
        InvalidGrammarError: it is too large.
    """
    for name, count in size.items():
        if count > _LIMITS[name]:
            raise InvalidGrammarError(f"{what}: over {_LIMITS[name]} {name}")


def check_schema(schema: Any, path: str = "$", *, strict: bool) -> Counter[str]:
    """Check that every keyword has a valid value within bounds, and that no schema refers only to itself.

    With `strict`, also check that nothing would be ignored that llguidance does not refuse by itself.

    Returns:
        The numbers of properties and of values in enumerations; that of properties is within the limit.

    Raises:
        InvalidGrammarError: the schema fails a check; the message names the place, and the keyword if one is
            at fault.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidGrammarError("a JSON schema is an object")
    size = Counter[str]()
    same_value: dict[int, list[int]] = {}
    for where, each, in_use in _reachable(schema, path):
        try:
            keywords = msgspec.convert(each, _Keywords)
        except msgspec.ValidationError as error:
            what, _, keyword = str(error).partition(" - at `$")
            what = what.replace("Invalid enum value", f"Expected one of {', '.join(get_args(_Type))}, got")
            raise InvalidGrammarError(f"{where[:200]}{keyword.rstrip('`')}: {what[:150]}") from None
        if len(keywords.properties.keys() - keywords.required) > OPTIONAL:
            raise InvalidGrammarError(
                f"{where[:200]}: over {OPTIONAL} properties may be left out of an object"
            )
        if strict and in_use:
            _check_enforced(each, keywords, where)
        size["properties"] += len(keywords.properties)
        size["values in enumerations"] += len(keywords.enum)
        referred = _referred(schema, each)
        if not all(isinstance(part, dict | bool) for part in referred):
            raise InvalidGrammarError(f"{where[:200]}.$ref leads to no schema")
        parts = [*referred, *(part for keyword in _IN_PLACE for part in each.get(keyword, ()))]
        same_value[id(each)] = [id(part) for part in parts if isinstance(part, dict)]
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        raise InvalidGrammarError(
            f"{path}: a $ref leads back to itself, with no object or array between"
        ) from None
    check_size({"properties": size["properties"]}, path)
    return size


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


def _check_enforced(schema: dict[str, Any], keywords: _Keywords, where: str) -> None:
    for keyword in _OLD:
        if keyword in schema:
            raise InvalidGrammarError(f"{where[:200]}: the keyword {keyword} cannot be enforced")
    if keywords.prefix_items and isinstance(keywords.items, list):
        raise InvalidGrammarError(f"{where[:200]}: prefixItems beside a list of items cannot be enforced")
    if keywords.min_properties > max(1, len(set(keywords.required))):
        # A key that `properties` does not name may be generated twice, and then counts only once.
        raise InvalidGrammarError(
            f"{where[:200]}: minProperties over 1 cannot be enforced beyond the required properties"
        )


def _reachable(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield `schema`, the schemas in it and those that references lead to, but no booleans.

    Each comes once, with its path and whether it is in use. Definitions without a reference are not, and come
    last; all are, if there is a reference of a kind that only llguidance resolves.
    """
    in_use: list[tuple[str, Any]] = [(path, schema)]
    unused: list[tuple[str, Any]] = []
    seen = set()
    while pending := in_use or unused:
        path, each = pending.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each, pending is in_use
        pending += _parts(each, path)
        referred = _referred(schema, each)
        pending += [(each["$ref"], part) for part in referred]
        if "$ref" in each and not referred and pending is in_use:
            in_use += unused
            unused = in_use
        for keyword in _DEFINITIONS:
            unused += [(f"{path}.{keyword}.{name}", part) for name, part in each.get(keyword, {}).items()]


def _parts(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        within = f"{path}.{keyword}"
        if keyword in _OF_MAP:
            yield from ((f"{within}.{name}", part) for name, part in value.items())
        elif keyword in _OF_LIST and isinstance(value, list):
            yield from ((f"{within}.{at}", part) for at, part in enumerate(value))
        elif keyword in _OF_ONE:
            yield within, value


def _referred(schema: Any, each: dict[str, Any]) -> list[Any]:
    try:
        return [target(schema, each["$ref"])] if "$ref" in each else []
    except LookupError:
        return []  # Refused later, when it is compiled.
