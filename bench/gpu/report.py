"""Output of the scripts that measure kernels: tables, and errors that do not end a run."""

import traceback
from collections.abc import Callable, Iterable

Results = dict[str, str]
"""Measurements as text, by label."""


def guarded(results: Results, label: str, measure: Callable[[], object]) -> str:
    """Store and return a measurement as text; an error is printed, and its text is `err`."""
    try:
        value = measure()
    except Exception as error:  # noqa: BLE001 - device time is scarce: go on with the next
        print(f"! {label}: {type(error).__name__}: {str(error)[:300]}")
        traceback.print_exc(limit=-2)
        value = "err"
    results[label] = f"{value:.1f}" if isinstance(value, float) else str(value)
    return results[label]


def print_table(title: str, header: Iterable[str], rows: Iterable[list[str]]) -> None:
    """Print one Markdown table."""
    print(f"\n{title}\n| " + " | ".join(header) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
