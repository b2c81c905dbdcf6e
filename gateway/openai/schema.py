"""JSON schemas in a request: limited in depth here, interpreted by the model side."""

from itertools import chain
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

MAX_DEPTH = 64
"""Nesting of objects and lists in a schema, and in a call's arguments."""


def shallow(value: Any) -> Any:
    """Return `value`, a JSON value.

    Raises:
        PydanticCustomError: objects and lists nest deeper than `MAX_DEPTH` in it.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each.values() if isinstance(each, dict) else each for each in level if _holds(each)]
        if not containers:
            return value
        level = list(chain.from_iterable(containers))
    raise PydanticCustomError("too_deep", f"nested deeper than {MAX_DEPTH} levels")


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


Schema = Annotated[dict[str, Any], AfterValidator(shallow)]
