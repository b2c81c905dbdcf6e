"""Keeps what a Prometheus knows of some panels: `python -m deploy.grafana.history PROMETHEUS OUT.json`.

For `deploy.grafana.picture`, which draws it. The queries are the dashboards' own.
"""

import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import click

from deploy.grafana.__main__ import FOLDER

_TIMEOUT_S = 60
_DIGITS = 5
PANELS = (
    ("service.json", "Requests by status"),
    ("service.json", "Tokens"),
    ("service.json", "Time to first token"),
    ("service.json", "Inter-token latency"),
    ("engine.json", "Running and waiting"),
    ("engine.json", "Step time"),
)
"""Of which dashboard, and the title; of two panels of a title, the first."""


@click.command()
@click.argument("prometheus")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--where", required=True, help="The machine and the load, in words.")
@click.option("--seconds", default=300, show_default=True, help="Up to now.")
@click.option("--step", default=5, show_default=True, help="Seconds between two points.")
@click.option("--rate", default="20s", show_default=True, help="What Grafana would put for $__rate_interval.")
def main(*, prometheus: str, out: Path, where: str, seconds: int, step: int, rate: str) -> None:
    """Ask the Prometheus at PROMETHEUS (host:port) for the newest `seconds`, for all models."""
    end = int(time.time())
    start = end - seconds
    panels = []
    for name, title in PANELS:
        panel = _find(name, title)
        series = [
            _series(target["legendFormat"], result, start)
            for target in panel["targets"]
            for result in _query(prometheus, _fill_in(target["expr"], rate), start, end, step)
        ]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        panels.append({"title": title, "unit": unit, "series": [each for each in series if each["points"]]})
    lines = ",\n".join(json.dumps(panel, ensure_ascii=False) for panel in panels)
    head = json.dumps({"where": where, "seconds": seconds}, ensure_ascii=False)
    out.write_text(f'{head[:-1]}, "panels": [\n{lines}\n]}}\n', encoding="utf-8")


def _find(name: str, title: str) -> dict[str, Any]:
    document = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = [panel for panel in document["panels"] if panel["title"] == title]
    return found[0]


def _fill_in(expr: str, rate: str) -> str:
    return expr.replace("$__rate_interval", rate).replace("$model", ".*")


def _query(prometheus: str, expr: str, start: int, end: int, step: int) -> list[dict[str, Any]]:
    asked = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": step})
    url = f"http://{prometheus}/api/v1/query_range?{asked}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def _series(legend: str, result: dict[str, Any], start: int) -> dict[str, Any]:
    """Return a curve: its name as Grafana would write it, and [seconds since the start, value] pairs."""
    for label, value in result["metric"].items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    points = [
        [at - start, float(f"{float(value):.{_DIGITS}g}")]
        for at, value in result["values"]
        if math.isfinite(float(value))
    ]
    return {"name": legend, "points": points}


if __name__ == "__main__":
    main()
