"""The SBOM lists the chat page's libraries beside the installed packages."""

import json
import sys
from pathlib import Path

import pytest

from deploy import sbom

VENDOR = sbom.LIBRARIES.parent
INSTALLED = {
    "metadata": {"component": {"bom-ref": "root-component", "name": "tritongate"}},
    "components": [{"bom-ref": "httpx==0.28", "name": "httpx"}],
    "dependencies": [{"ref": "httpx==0.28"}, {"dependsOn": ["httpx==0.28"], "ref": "root-component"}],
}


def test_it_has_every_vendored_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sbom.json"
    path.write_text(json.dumps(INSTALLED))
    monkeypatch.setattr(sys, "argv", ["sbom", str(path)])
    sbom.main()
    document = json.loads(path.read_text())
    installed, *libraries = document["components"]
    assert installed["name"] == "httpx"
    assert len(libraries) == len(list(VENDOR.glob("*.js")))
    licences = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8").lower()
    for each in libraries:
        assert each["purl"] == f"pkg:npm/{each['name']}@{each['version']}"
        assert f"== {each['name']} {each['version']} (" in licences
        assert each["licenses"][0]["expression"]
    (ours,) = (each for each in document["dependencies"] if each["ref"] == "root-component")
    assert ours["dependsOn"] == ["httpx==0.28", *(each["purl"] for each in libraries)]
