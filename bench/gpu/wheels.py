"""Lists the wheels to bring to a GPU host without a network: one requirement per line, for pip.

They are what `tritongate[embedded]` needs on that host's Python, in the versions of `constraints.txt`, except
for what the host has (torch, and with it the CUDA libraries, which it must keep; transformers), and for what
`nvidia-pytriton` needs for its own Python API, since only its tritonserver is used. Run it where the
project is installed.
"""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import click
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

HOSTS = frozenset({"torch", "transformers", "huggingface-hub"})
"""Packages that the host has; the last one in a version that suits its transformers."""
BINARIES = frozenset({"nvidia-pytriton"})
"""Packages that are used without their Python dependencies."""
TOOLS = ("aiohttp",)
"""Packages that the measurements themselves need."""


def needed(python: str) -> set[NormalizedName]:
    """Return the canonical names of all distributions that Python version `python` ("3.12") needs."""
    environment = _environment(python)
    found: set[NormalizedName] = set()
    queue = [Requirement("tritongate[embedded]"), *map(Requirement, TOOLS)]
    expanded: set[tuple[str, str]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in HOSTS:
            continue
        found.add(name)
        if name in BINARIES:
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) not in expanded:
                expanded.add((name, extra))
                queue += _dependencies(name, environment | {"extra": extra})
    return found - {canonicalize_name("tritongate")}


def _environment(python: str) -> dict[str, str]:
    environment = {key: str(value) for key, value in default_environment().items()}
    return environment | {"python_version": python, "python_full_version": python + ".0"}


def _dependencies(name: str, environment: dict[str, str]) -> Iterator[Requirement]:
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def pinned(names: set[NormalizedName], python: str) -> list[str]:
    """Return `name==version` of each, from the constraints for that version of Python.

    Raises:
        KeyError: a name is not in the constraints.
    """
    environment = _environment(python)
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    locked = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {
        canonicalize_name(each.name): each.specifier
        for each in locked
        if each.marker is None or each.marker.evaluate(environment)
    }
    return [f"{name}{versions[name]}" for name in sorted(names)]


@click.command(help=__doc__)
@click.option("--python", default="3.12", show_default=True, help="version of the host's Python")
def main(python: str) -> None:
    """Print the requirements."""
    click.echo("\n".join(pinned(needed(python), python)))


if __name__ == "__main__":
    main()
