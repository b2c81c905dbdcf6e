"""What `make up` installs, and what it says of a Python that the wheel's tritonserver has no stub for."""

import re
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


PYTHON = """#!/bin/sh
case "$*" in
"-c "*) ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*) echo "python $*" >> {log} ;;
esac
"""


@pytest.mark.parametrize(
    ("driver", "reached", "tools"),
    [(True, True, ["python"]), (False, True, ["uv", "python"]), (False, False, ["uv", "python"])],
    ids=["driver", "no driver", "no driver, and not to be had"],
)
def test_torch_for_cpus_comes_first_where_there_is_no_driver(
    tmp_path: Path, driver: bool, reached: bool, tools: list[str]
) -> None:
    log, lock = tmp_path / "log", tmp_path / "lock"
    (lock / "bin").mkdir(parents=True)
    uv = f'#!/bin/sh\necho "uv $*" >> {log}\nexit {0 if reached else 2}\n'
    for path, script in ((tmp_path / "python", PYTHON.format(log=log)), (lock / "bin" / "uv", uv)):
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)
    (lock / ".installed").touch()
    if driver:
        (tmp_path / "driver").touch()
    venv = tmp_path / "venv"
    names = {"PYTHON": "python", "VENV": "venv", "LOCK": "lock", "DRIVER": "driver"}
    values = [f"{name}={tmp_path / path}" for name, path in names.items()]
    done = subprocess.run(
        ["make", *values, f"{venv}/.up"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    called = log.read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in called] == tools
    assert called[-1].endswith("-c constraints.txt -e .[embedded]")
    assert ("pip takes what it finds" in done.stdout) == (not reached)
    if not driver:
        (pinned,) = re.findall(
            r"^torch==.*", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert called[0] == f"uv pip install --python {venv}/bin/python --torch-backend cpu {pinned}"
