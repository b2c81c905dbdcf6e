"""Plots latency over throughput of compared closed loops: `python -m bench.picture DATA.json OUT.svg`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_PANELS = {"per_token_p50": "time per output token, p50, ms", "ttft_p50": "time to first token, p50, ms"}
_STYLES = {"ours": ("tritongate", "#d1495b", "o"), "vllm": ("vLLM 0.24.0", "#30638e", "s")}
"""By the first word of a server's name; the others are its arguments."""
_USUAL_STYLES = {
    "tritongate up": ("tritongate", "#d1495b", "o"),
    "generate, padded batches": ("transformers' generate, padded batches", "#6b717e", "^"),
    "generate, one by one": ("one by one", "#6b717e", "x"),
}


@click.command()
@click.argument("data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, out: Path) -> None:
    """Draw what `bench.gpu.compare` wrote to DATA."""
    document = json.loads(data.read_text(encoding="utf-8"))
    rows = [row for row in document["rows"] if row["clients"]]
    # Text remains text in the SVG, and the same data gives the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9})
    usual = document.get("usual", [])
    figure = Figure(figsize=(13.5 if usual else 9, 4), layout="constrained")
    panels = figure.subplots(1, len(_PANELS) + bool(usual))
    for axes, (field, label) in zip(panels, _PANELS.items(), strict=False):
        _draw(axes, rows, field)
        axes.set_ylabel(label)
    if usual:
        _draw_usual(panels[-1], usual)
        panels[-1].legend(frameon=False, loc="lower left")
    for axes in panels:
        axes.set_xlabel("output tokens per second")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.suptitle(document["machine"].split(";")[0], fontsize=9)
    figure.savefig(out, metadata={"Date": None})


def _draw(axes: Axes, rows: list[dict[str, Any]], field: str) -> None:
    servers = {row["server"] for row in rows}
    for first, (name, color, marker) in _STYLES.items():
        (server,) = [each for each in servers if each.split()[0] == first]
        points = [
            _median([row for row in rows if (row["server"], row["clients"]) == (server, clients)])
            for clients in sorted({row["clients"] for row in rows if row["server"] == server})
        ]
        throughput = [row["tokens_per_second"] for row in points]
        label = server.replace(first, name, 1)
        axes.plot(throughput, [row[field] for row in points], marker=marker, color=color, label=label)
        for row in points:
            place = (row["tokens_per_second"], row[field])
            _name(axes, row["clients"], place, color, below=first == "ours")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


def _draw_usual(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for way, (name, color, marker) in _USUAL_STYLES.items():
        points = [row for row in rows if row["way"] == way]
        throughput, waited = [row["tok_s"] for row in points], [row["wait_p50"] for row in points]
        axes.loglog(throughput, waited, marker=marker, color=color, label=name, linestyle=":")
        for row, *place in zip(points, throughput, waited, strict=True):
            _name(axes, row["clients"], place, color, below=False)
    axes.set_ylim(bottom=0.05)
    axes.set_ylabel("the usual recipe: whole answer, p50, s")


def _name(axes: Axes, clients: int, place: Sequence[float], color: str, *, below: bool) -> None:
    offset = (4, -9) if below else (4, 5)
    axes.annotate(
        str(clients),
        (place[0], place[1]),
        xytext=offset,
        textcoords="offset points",
        color=color,
        fontsize=7,
    )


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the median throughput, which is also the one in the comparison's own table."""
    return sorted(rows, key=lambda row: row["tokens_per_second"])[(len(rows) - 1) // 2]


if __name__ == "__main__":
    main()
