"""`make` says what to install where it finds a Python that the wheel's tritonserver has no stub for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make_up(folder: Path, version: str) -> str:
    """Have `make` install with a Python that says it is `version`, and can do nothing but run the check."""
    python = folder / "python-other"
    fake = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[2])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{fake}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    venv = folder / "venv"
    done = subprocess.run(
        ["make", f"PYTHON={python}", f"VENV={venv}", f"{venv}/.up"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert not venv.exists()
    return done.stderr


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_another_python_is_refused_with_what_to_do(version: str, tmp_path: Path) -> None:
    said = make_up(tmp_path, version).splitlines()[0]
    assert f"needs Python 3.11 or 3.12, and {tmp_path}/python-other is {version}." in said
    assert "python3.12 and python3.12-venv" in said
    assert said.endswith("make up PYTHON=python3.12")


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_its_own_pythons_go_on_to_the_environment(version: str, tmp_path: Path) -> None:
    said = make_up(tmp_path, version)
    assert "needs Python" not in said
    assert "name 'venv' is not defined" in said  # what this one says to `-m venv`
