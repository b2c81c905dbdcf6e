"""Reads requests to entry `M` from the tensors of its contract.

The values come as text (or, in one contract, as INT16) and are parsed strictly: anything but a number in
range is refused with an error that names the field. `max_token` limits prompt and answer together, like
`max_length` in the original code, and is itself cut to the context without an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triton_models.errors import ClientInputError
from triton_models.serving.client_history import ClientHistory, Shape, parse_flat, parse_history
from triton_models.signatures import Contract
from wire import names

KEPT_ITEMS: Final = 10
"""Items of history that are used if the client does not say how many."""

HIGHEST_TEMPERATURE: Final = 2.0

Row = Mapping[str, Sequence[bytes] | Sequence[int]]
"""One row's tensors by name, flat: strings as bytes, INT16 as int. Optional ones may be missing."""

# The output of `str` and `repr` for Python's numbers.
_NUMBER = re.compile(rb"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?")
_INTEGER = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question of one client."""

    prompt: str
    history: ClientHistory
    """The part of the earlier conversation that is used."""
    temperature: float
    max_total_tokens: int


def read_ask(contract: Contract, row: Row, chat_format: str) -> Ask:
    """Read one row.

    Args:
        contract: the entry's contract.
        row: the row's tensors.
        chat_format: the checkpoint's; with ChatGLM2, an empty history counts as one of pairs.

    Raises:
        ClientInputError: a value cannot be used; the message names its field.
    """
    try:
        prompt = _string(row, names.PROMPT).decode()
    except UnicodeDecodeError as error:
        raise ClientInputError(f"prompt is not UTF-8: {error}") from error
    return Ask(
        prompt=prompt,
        history=_cut(_history(contract, row, chat_format), row),
        temperature=_temperature(_string(row, names.TEMPERATURE)),
        max_total_tokens=_integer(row, names.MAX_TOKEN, least=1),
    )


def _history(contract: Contract, row: Row, chat_format: str) -> ClientHistory:
    if contract is Contract.CHATGLM2:
        return parse_flat([value for value in row[names.HISTORY] if isinstance(value, bytes)])
    empty = Shape.PAIRS if chat_format == "chatglm2" else Shape.OBJECTS
    return parse_history(_string(row, names.HISTORY), empty)


def _cut(history: ClientHistory, row: Row) -> ClientHistory:
    if names.HISTORY_LEN not in row:
        return history.last_items(KEPT_ITEMS)
    return history.last_rounds(_integer(row, names.HISTORY_LEN, least=0))


def _temperature(text: bytes) -> float:
    if _NUMBER.fullmatch(text.strip()) and (value := float(text)) <= HIGHEST_TEMPERATURE:
        return value
    raise ClientInputError(
        f"temperature must be a decimal number from 0 to {HIGHEST_TEMPERATURE:g}, not {_shown(text)}"
    )


def _integer(row: Row, name: str, *, least: int) -> int:
    value = _only(row, name)
    if isinstance(value, bytes):
        if _INTEGER.fullmatch(value.strip()) and int(value) >= least:
            return int(value)
        raise ClientInputError(f"{name} must be a whole number of at least {least}, not {_shown(value)}")
    if value < least:
        raise ClientInputError(
            f"{name} must be at least {least}, not {value} (INT16 ends at 32767, and more wraps around)"
        )
    return value


def _string(row: Row, name: str) -> bytes:
    value = _only(row, name)
    if not isinstance(value, bytes):
        raise ClientInputError(f"{name} must be a string")
    return value


def _only(row: Row, name: str) -> bytes | int:
    values = row[name]
    if len(values) != 1:
        raise ClientInputError(f"{name} must be one value, not {len(values)}")
    return values[0]


def _shown(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))
