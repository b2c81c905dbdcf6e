"""Runs the benchmarks and prints their rows as Markdown tables, for LOG.md."""

import platform
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from bench import engine, serving
from bench.load import LoadRow

BUILT_IN = Path(__file__).parent.parent / "triton_models" / "checkpoints" / "chatglm3-demo"


def print_table(kind: type[Any], rows: Iterable[Any]) -> None:
    """Print dataclass rows as they come."""
    names = [field.name for field in fields(kind)]
    click.echo("| " + " | ".join(names) + " |")
    click.echo("| " + " | ".join("---" for _ in names) + " |")
    for row in rows:
        values = [
            f"{value:.2f}" if isinstance(value, float) else str(value) for value in asdict(row).values()
        ]
        click.echo("| " + " | ".join(values) + " |")


@click.command()
@click.argument("what", type=click.Choice(["engine", "serving", "all"]), default="all")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=BUILT_IN)
@click.option("--rounds", default=3, show_default=True, help="counted runs of each row")
def main(what: str, model: Path, rounds: int) -> None:
    """Measure on this machine. Compare only rows of one run: machines differ, and are noisy."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    click.echo(f"{now}, {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if what in ("engine", "all"):
        rows = engine.measure(model, (1, 8, 32), prompt=64, new_tokens=64, rounds=rounds)
        print_table(engine.EngineRow, rows)
        click.echo()
    if what in ("serving", "all"):
        served = serving.measure("--model", str(model), clients=(1, 8, 32, 64), new_tokens=128, rounds=rounds)
        print_table(LoadRow, served)


if __name__ == "__main__":
    main()
