"""What the READMEs and docs/ say is true. Their commands are run in `tests/e2e/test_quick_start.py`."""

import os
import re
import shlex
from pathlib import Path

import pytest

from gateway.settings import settings_table

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh.md")


PAGES = (*READMES, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")))


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def check_table(page: Path, name: str, expected: str) -> None:
    """Compare the table between a page's comments `name` and `/name`; with `WRITE_DOCS=1`, write it."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    before, rest = page.read_text(encoding="utf-8").split(start)
    table, after = rest.split(end)
    if os.environ.get("WRITE_DOCS"):
        page.write_text(before + start + expected + end + after, encoding="utf-8")
        return
    assert table == expected


def settings_as_documented() -> str:
    rows = ["| setting | flag | environment | default | |", "| --- | --- | --- | --- | --- |"]
    for row in settings_table():
        flag = f"`{row.flag}`" if row.flag else "none"
        default = f"`{row.default}`" if row.default else ""
        rows.append(f"| `{row.name}` | {flag} | `{row.env}` | {default} | {row.help} |")
    return "\n".join(rows)


@pytest.mark.parametrize("page", ["settings.md", "settings.zh.md"])
def test_the_settings_table_is_the_settings(page: str) -> None:
    check_table(ROOT / "docs" / page, "settings", settings_as_documented())


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_make_targets_in_the_documents_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [
        line for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("make")
    ]
    assert commands or page not in {
        *READMES,
        "docs/getting-started.md",
        "docs/development.md",
        "CONTRIBUTING.md",
    }
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("page", [page for page in PAGES if not page.endswith(".zh.md")])
def test_both_languages_show_the_same_commands(page: str) -> None:
    chinese = page.replace(".md", ".zh.md")
    if chinese in PAGES:
        assert commands_of(page) == commands_of(chinese)


def commands_of(page: str) -> list[list[str]]:
    return [shlex.split(block, comments=True) for block in blocks(page, "bash")]


def test_the_documents_begin_with_the_readmes_commands() -> None:
    assert commands_of("docs/getting-started.md") == commands_of("README.md")
