"""The committed dashboards are what the code makes; what they say of themselves holds together."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.grafana.__main__ import DASHBOARDS, FOLDER, main
from tests.deploy.prometheus_client import fill_in, panels


def test_the_committed_dashboards_are_the_codes(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(DASHBOARDS)
    for name in DASHBOARDS:
        committed, made = ((folder / name).read_text(encoding="utf-8") for folder in (FOLDER, tmp_path))
        assert committed == made, f"{name}: run `python -m deploy.grafana`"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_are_told_apart_and_placed(name: str) -> None:
    document = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in document["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for _, exprs in panels(FOLDER / name):
        assert exprs
        for expr in exprs:
            fill_in(expr)


def test_dashboards_are_told_apart() -> None:
    documents = [json.loads((FOLDER / name).read_text(encoding="utf-8")) for name in DASHBOARDS]
    for field in ("uid", "title"):
        assert len({document[field] for document in documents}) == len(documents)
