"""What is wrong with a setting, in the words of YAML: pydantic's speak of Python's types and our classes."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel

_KINDS: Final[Mapping[str, str]] = {
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "model_attributes_type": "a mapping is needed",
    "list_type": "a list is needed",
    "tuple_type": "a list is needed",
    "frozen_set_type": "a list is needed",
    "int_parsing": "a whole number is needed",
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_parsing": "a number is needed",
    "float_type": "a number is needed",
    "finite_number": "a number is needed",
    "bool_parsing": "true or false is needed",
    "bool_type": "true or false is needed",
    "string_type": "text is needed; YAML takes it for something else without quotes",
}


def reason_of(fault: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors says, without the field's name."""
    if fault["type"] == "too_short":
        return f"at least {fault['ctx']['min_length']} is needed"
    return _KINDS.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")


def without_consequences(faults: Sequence[Any]) -> list[Any]:
    """Return pydantic's errors, but for lists that are too short without what is faulty in them."""
    return [
        fault
        for fault in faults
        if fault["type"] != "too_short"
        or not any(other["loc"][:-1] == fault["loc"] for other in faults if other["loc"])
    ]


def unknown(place: Sequence[int | str], settings: type[BaseModel]) -> str:
    """Return what is said of a name at `place` within `settings` that there is not, and which was meant."""
    said = "unknown setting" if len(place) == 1 else "unknown key"
    near = get_close_matches(str(place[-1]).lower().replace("-", "_"), _known_beside(place, settings), n=1)
    return f"{said}; did you mean {near[0]}?" if near else said


def _known_beside(place: Sequence[int | str], settings: type[BaseModel]) -> Collection[str]:
    """Return the names that there are in the object that has the last part of `place`."""
    at: Any = settings
    for part in place[:-1]:
        fields = getattr(at, "model_fields", None)
        # A mapping or a list has none: `part` is one of its keys.
        at = fields[part].annotation if fields else next(x for x in get_args(at) if isinstance(x, type))
    known: Collection[str] = at.model_fields
    return known
