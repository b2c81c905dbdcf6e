"""What of JSON Schema would be passed over in silence, found before a schema is compiled.

llguidance refuses by name the keywords of today's drafts that it cannot enforce. The ones here it does not
know, since they are older, or does not enforce in full.
"""

from collections.abc import Iterator
from typing import Any, Final

from triton_models.errors import InvalidGrammarError

_UNKNOWN: Final = ("additionalItems", "extends", "disallow", "divisibleBy")

_OF_ONE: Final = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_OF_LIST: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_MAP: Final = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(schema: Any) -> None:
    """Hold that a schema means nothing which would be ignored.

    Raises:
        InvalidGrammarError: it does; the message names the keyword and where it stands.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidGrammarError("a JSON schema is an object")
    for path, each in subschemas(schema):
        for keyword in _UNKNOWN:
            if keyword in each:
                raise InvalidGrammarError(f"{path}: the keyword {keyword} cannot be enforced")
        least = each.get("minProperties", 0)
        if isinstance(least, int | float) and least > 1:
            # A key may come twice among those that `properties` does not name, and counts once.
            raise InvalidGrammarError(f"{path}: minProperties over 1 cannot be enforced")


def subschemas(schema: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `schema` and all that it holds, those that are objects, each with its path."""
    pending = [(path, schema)]
    while pending:
        path, each = pending.pop()
        if not isinstance(each, dict):
            continue
        yield path, each
        for keyword, value in each.items():
            within = f"{path}.{keyword}"
            if keyword in _OF_MAP and isinstance(value, dict):
                pending += [(f"{within}.{name}", part) for name, part in value.items()]
            elif keyword in _OF_LIST and isinstance(value, list):
                pending += [(f"{within}.{at}", part) for at, part in enumerate(value)]
            elif keyword in _OF_ONE:
                pending.append((within, value))


def target(schema: Any, pointer: Any) -> Any:
    """Return what `pointer`, the value of a `$ref`, refers to within `schema`.

    Raises:
        LookupError: nothing, or something elsewhere.
    """
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        raise LookupError(pointer)
    at = schema
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(name)] if isinstance(at, list) else at[name]
        except (TypeError, ValueError):
            raise LookupError(pointer) from None
    return at
