"""What is wrong with a body, in the words of JSON: pydantic's speak of Python's types and our classes."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_KINDS: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""The kinds of pydantic's errors that say which type a value should have."""

OBJECT_OF_TYPE: Final = "object_type"
"""The kind of our own error of a value that is no object of a known `type`."""


def worded(fault: Mapping[str, Any], alternatives: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the message of one of pydantic's errors; `alternatives` are those of other branches."""
    context = fault.get("ctx", {})
    match fault["type"]:
        case kind if kind == OBJECT_OF_TYPE and not isinstance(fault["input"], dict):
            return "Input should be an object"
        case kind if kind in _KINDS:
            faults = [fault, *alternatives]
            wanted = dict.fromkeys(_KINDS[each["type"]] for each in faults if each["type"] in _KINDS)
            return f"Input should be {' or '.join(wanted)}"
        case "too_short":
            least, found = context["min_length"], context["actual_length"]
            return f"Array should have at least {_items(least)}, not {found}"
        case "too_long":
            most, found = context["max_length"], context["actual_length"]
            more = "" if found is None else f", not {found}"
            return f"Array should have at most {_items(most)}{more}"
        case "string_pattern_mismatch":
            return f"String should match pattern '{context['pattern'].replace(chr(92) + 'z', '$')}'"
    return str(fault["msg"]).removeprefix("Value error, ")


_SURROGATE: Final = re.compile(
    r"(?i)\\u(?:d[89ab][0-9a-f]{2}(?!\\ud[c-f][0-9a-f]{2})|(?<!\\ud[89ab][0-9a-f]{2}\\u)d[c-f][0-9a-f]{2})"
)
"""One half of a character beyond 16 bits, without the other: a text was cut in the middle of an emoji."""


def _items(count: int) -> str:
    return f"{count} item{'' if count == 1 else 's'}"


def why_not_json(body: bytes) -> str:
    """Return what keeps `body` from being read as JSON in UTF-8, and where."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at byte {error.start}"
    try:
        json.loads(text, parse_constant=_no_constant, parse_int=float)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at").removesuffix(" starting at")
        return f"{reason[:1].lower()}{reason[1:]} at line {error.lineno}, column {error.colno}"
    except _ConstantError as error:
        return f"{error} is no number of JSON"
    # What Python reads all the same.
    half = _SURROGATE.search(text)
    return "a number is too large" if half is None else f"a string has half of a surrogate pair, {half[0]}"


class _ConstantError(Exception):
    """The text has a constant that only Python and JavaScript know."""


def _no_constant(name: str) -> float:
    raise _ConstantError(name)
