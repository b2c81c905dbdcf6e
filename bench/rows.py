"""Measurements as a table, and the one to show of several."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from gateway.commands.load_rows import LoadRow


def median_row(rows: Sequence[LoadRow]) -> LoadRow:
    """Return the row with the median throughput: an actual measurement, not a mean of several."""
    ordered = sorted(rows, key=lambda row: row.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2]


def table(kind: type[Any], rows: Iterable[Any], leave_out: Iterable[str] = ()) -> str:
    """Return dataclass rows as a Markdown table."""
    names = [each.name for each in fields(kind) if each.name not in set(leave_out)]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        values = asdict(row)
        lines.append("| " + " | ".join(_shown(values[name]) for name in names) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"  # noqa: PLR2004 - no decimals from here on
