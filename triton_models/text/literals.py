"""Python literals and their repetition, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from triton_models.text.grammar_text import json_rule, literal

COMMON_RULES: Final = r"""
SEP: /, ?/
COLON: /: ?/
STR: /'([^'\\\x00-\x1f\x7f]|\\[\\'"nrt])*'|"([^"\\\x00-\x1f\x7f]|\\[\\'"nrt])*"/
INT: /-?(0|[1-9][0-9]{0,17})/
NUM: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/
any: STR | NUM | "True" | "False" | "None" | any_list | any_dict
any_list: "[]" | "[" any (SEP any)* "]"
any_dict: "{}" | "{" STR COLON any (SEP STR COLON any)* "}"
"""
"""The rules shared by all grammars of literals."""

LONGEST: Final = 10_000
"""Largest bound on characters and items; a schema's larger bounds are cut to it."""

_PLAIN = re.compile(r"[^'\"\\\x00-\x1f\x7f]*")


def either(parts: Iterable[str]) -> str:
    """Return the alternation of `parts`, at least one."""
    each = list(dict.fromkeys(parts))
    return each[0] if len(each) == 1 else f"({' | '.join(each)})"


def repeated(item: str, least: int, most: int | None) -> str:
    """Return the expression for `least` to `most` items (None: no limit), separated by `SEP`."""
    if most == 0:
        return ""
    if most == 1:
        return item if least else f"({item})?"
    more = f"{item} (SEP {item}){times(max(0, least - 1), None if most is None else most - 1)}"
    return more if least else f"({more})?"


def times(least: int, most: int | None) -> str:
    """Return the operator that repeats the expression before it `least` to `most` times (None: no limit)."""
    if most is None:
        return f"{{{least},}}"
    return f"{{{least},{max(least, min(most, LONGEST))}}}"


def shared_json(schema: dict[str, Any]) -> str:
    """Return the expression for a string or number that JSON and Python write the same way."""
    return json_rule(
        schema, whitespace_pattern=None, whitespace_flexible=False, json_allowed_escapes='nrbtf\\"'
    )


def key(name: str) -> str:
    """Return the expression for the key `name`, in quotes."""
    return either(_quoted(name))


def _quoted(text: str) -> list[str]:
    quoted = [literal(json.dumps(text, ensure_ascii=False))]
    return [literal(f"'{text}'"), *quoted] if _PLAIN.fullmatch(text) else quoted


def written(value: Any) -> str:
    """Return the expression for `value` as a literal."""
    if isinstance(value, str):
        return either(_quoted(value))
    return literal(repr(value) if isinstance(value, bool) or value is None else _in_python(value))


def _in_python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_in_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_in_python(each)}' for key, each in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def is_of(value: Any, kinds: list[str]) -> bool:
    """Return whether a JSON value is of one of JSON Schema's types."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kind = "null" if value is None else names[type(value)]
    return kind in kinds or (kind == "integer" and "number" in kinds)
