"""Grammar rules for an object's entries in fixed order, some of which are optional."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_NOTHING: Final = '""'


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an object: its name, the expression that matches it, and whether it is required."""

    name: str
    body: str
    required: bool


def in_order(entries: Sequence[Entry], new_rule: Callable[[str], str]) -> str:
    """Return the expression for `entries` in order, separated by `SEP`; optional ones may be left out.

    Each entry has two rules: one if no entry was written before it, one if some was. They are built starting
    from the last entry, so that the grammar grows with the number of entries, not with that of their
    combinations.

    Args:
        entries: at least one.
        new_rule: takes a rule's body, and returns its name.
    """
    first = after = ""
    for entry in reversed(entries):
        here = f"{entry.body} {after}".rstrip()
        between = f"SEP {here}"
        if entry.required:
            first, after = new_rule(here), new_rule(between)
        else:
            first = new_rule(f"{here} | {first or _NOTHING}")
            after = new_rule(f"{between} | {after or _NOTHING}")
    return first
