"""Packs a Python environment into an archive for Triton's parameter `EXECUTION_ENV_PATH`.

    python -m triton_models.environment --out tritongate-py3.12.tar.gz [--python /usr/bin/python3.12]

Triton unpacks the archive into a folder below `/tmp` (once per server and path), sources `bin/activate` there
and starts its stub. The stub embeds the Python whose `python3` comes first on PATH (Python backend's README,
"Creating Custom Execution Environments"). The archive holds `site-packages` and an `activate` script that
turns the folder, wherever it was unpacked, into a virtual environment of the Python on the *target* machine.
It contains neither the standard library nor libpython. So an archive is for one minor version of Python, the
stub's, and for targets of the same platform that have this Python on PATH.

The existing packers (venv-pack, venv-pack2) write the path of the packing machine's Python into the archive
instead.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from tqdm import tqdm

from triton_models.errors import EnvironmentPackError

SUFFIX = ".tar.gz"
"""The archive's suffix, by which Triton tells an archive from a folder."""

_DISTRIBUTION = "tritongate"
_EXTRA = "engine"
_GZIP_LEVEL = 4
"""For numpy, level 9 yields a 6 % smaller archive but takes six times as long."""

_ACTIVATE = """\
# Sourced by bash, before Triton's Python backend starts a stub: makes this folder, wherever it was unpacked,
# a virtual environment of the Python {version} on PATH. It never fails, since Triton would wait for the stub
# for ever; a stub that finds none of its packages says so.
VIRTUAL_ENV="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")/.." && pwd -P)"
_base="$(python{version} -I -c 'import os, sys; print(os.path.realpath(sys._base_executable))')"
if [ -z "$_base" ]; then
    echo "$VIRTUAL_ENV needs python{version} on PATH: it holds no standard library of its own." >&2
elif [ "$(readlink -- "$VIRTUAL_ENV/bin/python3")" != "$_base" ]; then
    # Renamed into place: stubs of several entries start side by side.
    printf 'home = %s\\ninclude-system-site-packages = false\\n' "$(dirname -- "$_base")" \\
        > "$VIRTUAL_ENV/pyvenv.cfg.$$" &&
        mv -f -- "$VIRTUAL_ENV/pyvenv.cfg.$$" "$VIRTUAL_ENV/pyvenv.cfg" &&
        ln -sfn -- "$_base" "$VIRTUAL_ENV/bin/python3.$$" &&
        mv -fT -- "$VIRTUAL_ENV/bin/python3.$$" "$VIRTUAL_ENV/bin/python3" ||
        echo "$VIRTUAL_ENV cannot be made an environment of $_base." >&2
fi
unset _base PYTHONHOME
export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
"""


def own_requirement() -> str:
    """Return the pip requirement for this copy of tritongate with the engine: its source, or its release."""
    wanted = f"{_DISTRIBUTION}[{_EXTRA}]"
    source = Path(__file__).resolve().parents[1]
    if (source / "pyproject.toml").is_file():
        return f"{wanted} @ {source.as_uri()}"
    distribution = importlib.metadata.distribution(_DISTRIBUTION)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"{wanted} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    return f"{wanted} @ {origin['url']}" if origin else f"{wanted}=={distribution.version}"


def build_environment(
    folder: Path, *, python: str, requirements: Sequence[str], constraints: Sequence[Path] = ()
) -> None:
    """Make `folder` a virtual environment of `python` with `requirements`, installed by its pip.

    Raises:
        EnvironmentPackError: the environment cannot be created; the output of venv or pip is on stderr.
    """
    new = folder / "bin" / "python"
    limits = [text for path in constraints for text in ("--constraint", str(path))]
    for command in (
        [python, "-m", "venv", "--without-pip", str(folder)],
        [python, "-m", "pip", "--python", str(new), "install", "--quiet", *limits, *requirements],
    ):
        try:
            # stdout is reserved for the result.
            subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603 - the caller's own Python
        except (OSError, subprocess.CalledProcessError) as error:
            raise EnvironmentPackError(f"{' '.join(command[:4])}: {error}") from error


def pack_environment(environment: Path, out: Path) -> str:
    """Write the packages of a virtual environment to `out`; return its sizes, and what it needs, in words.

    `bin` is left out: its scripts begin with the path of the Python for which they were installed.

    Raises:
        EnvironmentPackError: `environment` is no virtual environment or does not hold all of its packages, or
            `out` does not end in `.tar.gz` or cannot be written.
    """
    if not out.name.endswith(SUFFIX):
        raise EnvironmentPackError(f"{out}: the name must end in {SUFFIX}, by which Triton knows an archive")
    packages = _site_packages(environment)
    version = packages.parent.name.removeprefix("python")
    files = [path for path in sorted(packages.rglob("*")) if path.is_symlink() or not path.is_dir()]
    total = sum(path.lstat().st_size for path in files)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with (
            tarfile.open(unfinished, "x:gz", compresslevel=_GZIP_LEVEL) as archive,
            tempfile.NamedTemporaryFile("w") as activate,
            tqdm(desc=f"packing {out.name}", total=total, unit="B", unit_scale=True) as bar,
        ):
            activate.write(_ACTIVATE.format(version=version))
            activate.flush()
            archive.add(activate.name, "bin/activate", filter=_nobodys)
            for path in files:
                archive.add(path, str(path.relative_to(environment)), filter=_nobodys)
                bar.update(path.lstat().st_size)
        unfinished.replace(out)
    except OSError as error:
        raise EnvironmentPackError(f"{out}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    packed = out.stat().st_size
    return (
        f"{out}: {packed / 1e6:,.0f} MB, {total / 1e6:,.0f} MB unpacked, for a Triton whose stub is of"
        f" Python {version} and that has python{version} on PATH"
    )


def pack(
    out: Path, *, python: str, requirements: Sequence[str] = (), constraints: Sequence[Path] = ()
) -> str:
    """Pack tritongate with its engine, and further requirements, for this Python; return what `out` needs.

    Raises:
        EnvironmentPackError: they cannot be installed or packed.
    """
    with tempfile.TemporaryDirectory(prefix="tritongate-environment-") as folder:
        new = Path(folder) / "environment"
        wanted = [own_requirement(), *requirements]
        build_environment(new, python=python, requirements=wanted, constraints=constraints)
        return pack_environment(new, out)


def _site_packages(environment: Path) -> Path:
    """Return the folder that holds all packages of an environment.

    Raises:
        EnvironmentPackError: there is no such folder, packages are elsewhere, or numpy is missing.
    """
    try:
        configuration = (environment / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentPackError(f"{environment} is no virtual environment: {error}") from error
    if "include-system-site-packages = true" in configuration.lower():
        raise EnvironmentPackError(f"{environment} uses packages of the system, which would not be packed")
    found = list(environment.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise EnvironmentPackError(f"{environment} has {len(found)} folders lib/python3.*/site-packages")
    if editable := sorted(_editable(found[0])):
        raise EnvironmentPackError(
            f"{environment}: {', '.join(editable)} is installed as a link to its source (pip install -e)"
        )
    if not (found[0] / "numpy").is_dir():
        raise EnvironmentPackError(f"{environment} has no numpy, without which Triton's stub does not start")
    return found[0]


def _editable(packages: Path) -> Iterator[str]:
    for distribution in importlib.metadata.distributions(path=[str(packages)]):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield distribution.name


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner's name, and make the file readable to every user who may run the server."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode |= 0o444
    return member


@click.command()
@click.argument("more", nargs=-1, metavar="[REQUIREMENT]...")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The archive: NAME{SUFFIX}.",
)
@click.option(
    "--python",
    default=sys.executable,
    show_default="this one",
    help="Of the minor version of Triton's stub, with pip.",
)
@click.option(
    "--constraint",
    "constraints",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A constraints file for pip; repeatable.",
)
@click.option(
    "--environment",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Pack this virtual environment instead of a new one.",
)
def main(
    *, more: tuple[str, ...], out: Path, python: str, constraints: tuple[Path, ...], environment: Path | None
) -> None:
    """Pack tritongate with its engine, and REQUIREMENTs of yours, for Triton's EXECUTION_ENV_PATH."""
    if environment is not None and (more or constraints):
        raise click.UsageError("--environment is packed as it is: it excludes REQUIREMENTs and --constraint")
    try:
        if environment is not None:
            click.echo(pack_environment(environment, out))
        else:
            click.echo(pack(out, python=python, requirements=more, constraints=constraints))
    except EnvironmentPackError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
