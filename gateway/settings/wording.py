"""What is wrong with a setting, in the words of YAML: pydantic's speak of Python's types and our classes."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

_KINDS: Final[Mapping[str, str]] = {
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "model_attributes_type": "a mapping is needed",
    "list_type": "a list is needed",
    "tuple_type": "a list is needed",
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


def unknown(name: object, known: Collection[str]) -> str:
    """Return what is said of a setting that there is not, and which was probably meant."""
    near = get_close_matches(str(name).lower().replace("-", "_"), known, n=1)
    return f"unknown setting; did you mean {near[0]}?" if near else "unknown setting"
