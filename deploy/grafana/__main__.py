"""Writes the dashboards' JSON: `python -m deploy.grafana [DIR]`."""

import json
from pathlib import Path

import click
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.engine import engine
from deploy.grafana.service import service
from deploy.grafana.upstreams import upstreams

DASHBOARDS = {"service.json": service, "engine.json": engine, "upstreams.json": upstreams}
FOLDER = Path(__file__).parent / "dashboards"


def render(made: Dashboard) -> str:
    """Return a dashboard as the JSON text of its file."""
    return json.dumps(made, cls=JSONEncoder, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


@click.command()
@click.argument("folder", default=FOLDER, type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Write all of them to FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in DASHBOARDS.items():
        (folder / name).write_text(render(make()), encoding="utf-8")


if __name__ == "__main__":
    main()
