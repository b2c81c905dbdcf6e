"""Places of processes that share a table, and nothing else."""

from pathlib import Path

from gateway.telemetry.metrics import Place


def places(table: int, count: int = 2) -> list[Place]:
    """Return the places of that many processes."""
    return [
        Place(number=number, count=count, folder=Path("/nowhere"), table=table) for number in range(count)
    ]
