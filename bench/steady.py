"""Measures tokens a second under a load without an end: `python -m bench.steady FOLDER -- FLAGS`.

Clients ask without a pause, with prompts and answers of mixed lengths. What counts is how far the gateway's
own counter of tokens moves between two moments at which all clients are busy. A load of a fixed number of
requests also measures its end, when few long answers are left: the faster the servers, the more of it.
"""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import httpx

from bench.gpu.servers import up
from bench.rows import table

_MANY_ROUNDS = 100_000
_LOAD = ("--prompt", "180", "--out", "180", "--spread", "1")
_SAMPLING = '{"top_p": 0.8, "temperature": 0.8}'


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyRow:
    """One measurement."""

    flags: str
    clients: int
    seconds: float
    tok_s: float
    times: float
    """Of the first row's tokens a second."""


def generated(exposition: str) -> float:
    """Return how many tokens the gateway has received, of all models."""
    found = re.findall(r"^tritongate_generated_tokens_total\{.*\} (\S+)$", exposition, re.MULTILINE)
    return sum(map(float, found))


@contextmanager
def loaded(url: str, kind: str, clients: int, processes: int) -> Iterator[None]:
    """Have clients ask until the block ends."""
    command = [str(Path(sys.executable).with_name("tritongate")), "bench", url, *_LOAD]
    command += ["--kind", kind, "--also", _SAMPLING, "--clients", str(clients), "--rounds", str(_MANY_ROUNDS)]
    command += ["--processes", str(processes)]
    load = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
        if load.poll() is not None:
            raise click.ClickException("the load ended by itself; its output is above")
    finally:
        load.send_signal(signal.SIGINT)
        try:
            load.wait(10)
        except subprocess.TimeoutExpired:
            load.kill()
            load.wait()


def measure(url: str, seconds: float) -> float:
    """Return tokens a second over the next so many seconds."""
    began = time.monotonic()
    before = generated(httpx.get(url + "/metrics", timeout=20).text)
    time.sleep(seconds)
    after = generated(httpx.get(url + "/metrics", timeout=20).text)
    return (after - before) / (time.monotonic() - began)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--with", "variants", multiple=True, default=("",), help="of `tritongate up`; each is measured")
@click.option("--kind", default="ids", show_default=True, help="of prompts, as of `tritongate bench`")
@click.option("--clients", default=768, show_default=True)
@click.option("--processes", default=8, show_default=True, help="that send")
@click.option("--ramp-s", default=15.0, show_default=True, help="before what counts")
@click.option("--seconds", default=30.0, show_default=True)
@click.argument("flags", nargs=-1)
def main(
    *,
    folder: Path,
    variants: tuple[str, ...],
    kind: str,
    clients: int,
    processes: int,
    ramp_s: float,
    seconds: float,
    flags: tuple[str, ...],
) -> None:
    """Print a row for each variant."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[SteadyRow] = []
    for number, variant in enumerate(variants):
        with (
            up(*flags, *shlex.split(variant), log=folder / f"{number}.log") as url,
            loaded(url, kind, clients, processes),
        ):
            time.sleep(ramp_s)
            tok_s = measure(url, seconds)
        first = rows[0].tok_s if rows else tok_s
        rows.append(
            SteadyRow(flags=variant, clients=clients, seconds=seconds, tok_s=tok_s, times=tok_s / first)
        )
        click.echo(f"{variant}: {tok_s:,.0f} tok/s", err=True)
    click.echo(table(SteadyRow, rows))


if __name__ == "__main__":
    main()
