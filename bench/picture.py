"""Plots latency over throughput of compared closed loops: `python -m bench.picture DATA.json OUT.svg`."""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_PANELS = {"per_token_p50": "time per output token, p50, ms", "ttft_p50": "time to first token, p50, ms"}
_STYLES = {"ours": ("tritongate", "#d1495b", "o"), "vllm": ("vLLM 0.24.0", "#30638e", "s")}


@click.command()
@click.argument("data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, out: Path) -> None:
    """Draw what `bench.gpu.compare` wrote to DATA."""
    document = json.loads(data.read_text(encoding="utf-8"))
    rows = [row for row in document["rows"] if row["clients"]]
    # Text remains text in the SVG, and the same data gives the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9})
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (field, label) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        _draw(axes, rows, field)
        axes.set_xlabel("output tokens per second")
        axes.set_ylabel(label)
    figure.axes[0].legend(frameon=False)
    figure.suptitle(document["machine"].split(";")[0], fontsize=9)
    figure.savefig(out, metadata={"Date": None})


def _draw(axes: Axes, rows: list[dict[str, Any]], field: str) -> None:
    for server, (name, color, marker) in _STYLES.items():
        points = [
            _median([row for row in rows if (row["server"], row["clients"]) == (server, clients)])
            for clients in sorted({row["clients"] for row in rows if row["server"] == server})
        ]
        throughput = [row["tokens_per_second"] for row in points]
        axes.plot(throughput, [row[field] for row in points], marker=marker, color=color, label=name)
        for row in points:
            place = (row["tokens_per_second"], row[field])
            offset = (4, -9) if server == "ours" else (4, 5)
            axes.annotate(
                str(row["clients"]), place, xytext=offset, textcoords="offset points", color=color, fontsize=7
            )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the median throughput, which is also the one in the comparison's own table."""
    return sorted(rows, key=lambda row: row["tokens_per_second"])[(len(rows) - 1) // 2]


if __name__ == "__main__":
    main()
