"""Draws what `deploy.grafana.history` kept: `python -m deploy.grafana.picture DATA.json OUT.svg`.

Panels of our dashboards, but not drawn by Grafana; the picture says so itself.
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLUMNS = 3
_UNITS = {"s": "seconds", "reqps": "requests/s", "short": "", "percentunit": "share"}
_COLORS = ("#30638e", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#2e4057")


@click.command()
@click.argument("data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, out: Path) -> None:
    """Draw DATA to OUT."""
    document = json.loads(data.read_text(encoding="utf-8"))
    panels = document["panels"]
    # Text stays text, and the same data gives the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "deploy", "font.size": 8})
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(10, 2.4 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for each, panel in zip(axes, panels, strict=False):
        _draw(each, panel, document["seconds"])
    for each in axes[len(panels) :]:
        each.set_visible(False)
    figure.suptitle(
        f"{document['where']}. From Prometheus by the dashboards' queries; drawn with matplotlib.", fontsize=8
    )
    figure.savefig(out, metadata={"Date": None})


def _draw(axes: Axes, panel: dict[str, Any], seconds: int) -> None:
    for number, series in enumerate(panel["series"]):
        times = [at / 60 for at, _ in series["points"]]
        values = [value for _, value in series["points"]]
        axes.plot(times, values, color=_COLORS[number % len(_COLORS)], label=series["name"], linewidth=1.2)
    axes.set_title(panel["title"], fontsize=8, fontweight="bold", loc="left")
    axes.set_ylabel(_UNITS.get(panel["unit"], panel["unit"]))
    axes.set_xlim(0, seconds / 60)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6)


if __name__ == "__main__":
    main()
