"""Runs the benchmarks and prints their rows as Markdown tables, for LOG.md."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import click
import torch

from bench import delivery, engine, engine_host, gateway_delivery, serving, usual
from bench.rows import table
from gateway.commands.load_rows import LoadRow

BUILT_IN = Path(__file__).parent.parent / "triton_models" / "checkpoints" / "chatglm3-demo"


@click.command()
@click.argument("what", type=click.Choice(["engine", "serving", "delivery", "usual", "all"]), default="all")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=BUILT_IN)
@click.option("--rounds", default=3, show_default=True, help="counted runs of each row")
def main(what: str, model: Path, rounds: int) -> None:
    """Measure on this machine. Compare only rows of one run: machines differ, and are noisy."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    click.echo(f"{now}, {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if what in ("engine", "all"):
        rows = engine.measure(engine.models(model), (1, 8, 32), prompt=64, new_tokens=64, rounds=rounds)
        click.echo(table(engine.EngineRow, rows))
        click.echo()
    if what in ("serving", "all"):
        served = serving.measure("--model", str(model), clients=(1, 8, 32, 64), new_tokens=128, rounds=rounds)
        click.echo(table(LoadRow, served, leave_out={"rate", "within"}))
        click.echo()
    if what in ("delivery", "all"):
        rows_of_engine = engine_host.measure(model, (128, 512), new_tokens=200)
        click.echo(table(engine_host.EngineHostRow, rows_of_engine))
        click.echo()
        click.echo(table(delivery.DeliveryRow, delivery.measure(model, (256,), new_tokens=256)))
        click.echo()
        rows_of_gateway = gateway_delivery.measure((256,), new_tokens=100)
        click.echo(table(gateway_delivery.GatewayDeliveryRow, rows_of_gateway))
        click.echo()
    if what in ("usual", "all"):
        plans = {
            "demo": usual.Plan(clients=(1, 4, 8), requests=32, longest=96, rounds=rounds, limit_s=4.0),
            "random": usual.Plan(clients=(1, 8), requests=24, longest=48, rounds=rounds, limit_s=4.0),
        }
        click.echo(table(usual.UsualRow, usual.measure_on_cpu(model, plans)))


if __name__ == "__main__":
    main()
