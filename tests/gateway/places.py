"""Places of processes that share a table, and nothing else."""

from gateway.telemetry.metrics import Place


def places(table: int, count: int = 2) -> list[Place]:
    """Return the places of that many processes."""
    return [
        Place(number=number, count=count, table=table, applied={}, asks=[], asked=-1)
        for number in range(count)
    ]
