"""ARCHITECTURE.md names every room there is; it, its pages and the contract name no file that is gone."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
INTERNALS = tuple(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("internals-*.md")))
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "wire/README.md", *INTERNALS)
SIDES = {"gateway": "Gateway", "triton_models": "Model side"}
TREES = (*SIDES, "wire", "deploy", "tests", "bench", "tools", "docs", "examples")
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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    files = {path.relative_to(ROOT).as_posix() for tree in TREES for path in (ROOT / tree).rglob("*.*")}
    named = set(re.findall(r"`([\w/]+\.(?:py|md))`", text))
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} == set()


@pytest.mark.parametrize("document", [*DOCUMENTS, "deploy/README.md"])
def test_every_link_leads_to_a_heading(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8"))
    assert {
        link for link in links if not leads_somewhere(path.parent / link[0] if link[0] else path, link[1])
    } == set()


def leads_somewhere(path: Path, anchor: str) -> bool:
    """Return whether `path` exists and has a heading that GitHub calls `anchor`."""
    if not path.exists() or not anchor:
        return path.exists()
    headings = re.findall(r"(?m)^#+ (.*)", path.read_text(encoding="utf-8"))
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
