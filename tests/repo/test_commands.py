"""Every command of ours that a document shows exists as it is written: subcommand, flags, modules, files.

Those that need no GPU, cluster or foreign server are run besides, in `tests/e2e/test_quick_start.py` and
`test_examples.py`.
"""

import importlib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

from gateway.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(
        ROOT / name
        for name in ("deploy/README.md", "examples/README.md", "bench/gpu/README.md", "wire/README.md")
    ),
]
PACKAGES = {"bench", "gateway", "tools", "triton_models"}
ENDS = {"|", "&", "&&", ";", ">", "#"}
OURS = re.compile(r"(examples|tools/\w+|bench)/\w+\.py")
HISTORY = {"CHANGELOG.md"}
"""Tells of commands that are no more."""


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of ours, in blocks and within lines; no pipes or redirections."""
    blocks = re.findall(r"(?ms)^ *```[^\n]*\n(.*?)^ *```", text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```", "", text))
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a picture, or another language
            continue
        while words and (words[0] == "$" or "=" in words[0]):
            del words[0]
        name = Path(words[0]).name if len(words) > 1 else ""
        if name == "tritongate":
            yield ["tritongate", *until_end(words[1:])]
        elif name in {"python", "python3", "$PY"}:
            yield ["python", *until_end(words[1:])]


def until_end(words: list[str]) -> list[str]:
    """Return the words of one command."""
    end = next((place for place, word in enumerate(words) if word in ENDS or word.endswith(";")), len(words))
    return words[:end]


def faults(words: list[str]) -> list[str]:
    """Return what of a command does not exist."""
    program, first, *rest = words
    if program == "python":
        if first == "-m":
            return faults_of_module(*rest)
        return [first] if OURS.fullmatch(first) and not (ROOT / first).exists() else []
    if first.startswith("-"):
        return unknown(cli, [first, *rest])
    if not first.islower():  # a name in its place: COMMAND
        return []
    command = cli.get_command(click.Context(cli), first)
    if command is None:
        return [first]
    passes_on = command.context_settings.get("ignore_unknown_options")
    return faults_of_module(f"triton_models.{first}", *rest) if passes_on else unknown(command, rest)


def faults_of_module(name: str = "", *words: str) -> list[str]:
    if name.partition(".")[0] not in PACKAGES:
        return []
    try:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            module = importlib.import_module(name + ".__main__")
    except ModuleNotFoundError as error:
        return [str(error)]
    main = getattr(module, "main", None)
    return unknown(main, words) if isinstance(main, click.Command) else []


def unknown(command: click.Command, words: Iterable[str]) -> list[str]:
    """Return the flags among `words`, up to those for another command, that a command does not have."""
    known = options(command) | {"--help"}
    return [
        word
        for word in itertools.takewhile(lambda word: word != "--", words)
        if re.match("--[a-z]", word) and " " not in word and word.partition("=")[0] not in known
    ]


def options(command: click.Command) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name
)
def test_every_command_exists_as_it_is_written(page: Path) -> None:
    found = {" ".join(words): faults(words) for words in commands(page.read_text(encoding="utf-8"))}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


def test_what_does_not_exist_is_found() -> None:
    block = "```bash\n.venv/bin/python -m bench.nothing\ntritongate sevre \\\n --port 1\n```\n"
    text = "`tritongate up --nope 1 | less --x`\n\n" + block
    assert [faults(words) for words in commands(text)] == [
        ["No module named 'bench.nothing'"],
        ["sevre"],
        ["--nope"],
    ]
