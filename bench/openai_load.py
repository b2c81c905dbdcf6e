"""Puts load on an OpenAI endpoint and prints one row for each setting."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from bench.load import LoadPool, Workload, closed_loop, open_loop
from bench.load_rows import LoadRow, table


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas."""

    name = "N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Parse the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(each) for each in str(value).split(",") if each)
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)


@click.command(help=__doc__)
@click.option("--url", default="http://127.0.0.1:8080", show_default=True)
@click.option("--model", required=True)
@click.option(
    "--ids", type=click.IntRange(1), help="prompts of so many token ids; without: one question, as chat"
)
@click.option("--shared", default=0, help="so many of them the same in every prompt")
@click.option("--out", default=256, show_default=True, help="tokens of each answer")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--conc", type=Numbers(), default="1,8,32", show_default=True, help="clients of a closed loop")
@click.option("--rounds", default=2, show_default=True, help="requests of each client, one after the other")
@click.option(
    "--rate", type=Numbers(), default="", help="requests a second of an open loop, instead of --conc"
)
@click.option("--seconds", default=20.0, show_default=True, help="of an open loop")
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--processes", default=8, show_default=True)
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="append rows here, as lines"
)
def main(
    *,
    url: str,
    model: str,
    ids: int | None,
    shared: int,
    out: int,
    temperature: float,
    conc: tuple[float, ...],
    rounds: int,
    rate: tuple[float, ...],
    seconds: float,
    stream: bool,
    processes: int,
    file: Path | None,
) -> None:
    """Measure and print."""
    workload = Workload(
        url=url, model=model, ids=ids, shared=shared, out=out, temperature=temperature, stream=stream
    )

    def rows(pool: LoadPool) -> Iterator[LoadRow]:
        closed_loop(pool, workload, "warm-up", clients=1, requests=1)
        for each in rate:
            yield open_loop(pool, workload, f"rate {each}", rate=each, seconds=seconds)
        for clients in () if rate else map(int, conc):
            yield closed_loop(
                pool, workload, f"clients {clients}", clients=clients, requests=clients * rounds
            )

    with LoadPool(processes) as pool:
        measured = list(rows(pool))
    click.echo(table(LoadRow, measured, leave_out={"clients"} if rate else {"rate", "within"}))
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(asdict(row)) + "\n" for row in measured)


if __name__ == "__main__":
    main()
