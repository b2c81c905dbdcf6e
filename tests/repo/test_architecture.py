"""ARCHITECTURE.md names every room there is, and no file that is gone."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SIDES = {"gateway": "Gateway", "triton_models": "Model side"}
TREES = (*SIDES, "wire", "deploy", "tests", "bench", "demo")
ELSEWHERE = {"errors.py", "version.py"}
"""The first is named in the text above the tables; of the second there is nothing to say."""


@pytest.mark.parametrize("package", SIDES)
def test_every_room_is_in_its_table(package: str) -> None:
    table = TEXT.split(f"**{SIDES[package]}**\n\n")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = {name for row in rows for name in re.findall(r"`([\w*./]+)`", row)}
    rooms = {path.name for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")}
    rooms |= {f"{path.name}/" for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    assert {room for room in rooms - ELSEWHERE if not any(fnmatch(room, name) for name in named)} == set()
    assert {name for name in named if not list((ROOT / package).glob(name.rstrip("/")))} == set()


def test_every_file_named_exists() -> None:
    files = {path.relative_to(ROOT).as_posix() for tree in TREES for path in (ROOT / tree).rglob("*.*")}
    named = set(re.findall(r"`([\w/]+\.(?:py|md))`", TEXT))
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} == set()
