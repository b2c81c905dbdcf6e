"""Keeps what a gateway and a Triton export now: `python -m deploy.grafana.record OUT --where TEXT`.

To be run on a GPU host, under load: tests ask these files the dashboards' GPU queries, because where they run
there is no GPU. The text format lets comments in; the first line says that it is a recording, and of what.
"""

import datetime as dt
import urllib.request
from pathlib import Path

import click

_TIMEOUT_S = 20


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--where", required=True, help="The machine, in words: what the recording is of.")
@click.option("--gateway", default="127.0.0.1:8080", show_default=True)
@click.option("--triton", default="127.0.0.1:8002", show_default=True, help="Its metrics' address.")
def main(*, out: Path, where: str, gateway: str, triton: str) -> None:
    """Write OUT/gateway.prom and OUT/triton.prom."""
    out.mkdir(parents=True, exist_ok=True)
    for name, address in (("gateway", gateway), ("triton", triton)):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
            exposition = response.read().decode()
        today = dt.datetime.now(tz=dt.UTC).date()
        (out / f"{name}.prom").write_text(f"# Recorded {today}: {where}\n{exposition}", encoding="utf-8")


if __name__ == "__main__":
    main()
