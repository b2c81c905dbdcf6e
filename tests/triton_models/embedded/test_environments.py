import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from triton_models.embedded import environments
from triton_models.embedded.environments import EnvironmentClaim

OTHER = """
import sys
from pathlib import Path
from triton_models.embedded import environments

environments._ENVIRONMENTS = Path(sys.argv[1])
print("asks", flush=True)
with environments.EnvironmentClaim(lambda names: print(*names)) as claim:
    print("turn", flush=True)
    sys.stdin.readline()
    (environments._ENVIRONMENTS / "python_env_other").mkdir()
    assert claim.wait(60)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environments, "_ENVIRONMENTS", tmp_path)
    return tmp_path


def test_another_process_has_its_turn_when_the_folder_is_there_and_each_is_given_its_own(place: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(place)]
    found: list[set[str]] = []
    with (
        EnvironmentClaim(found.append) as claim,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "asks\n"
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(other.stdout.readline()))
        reader.start()
        reader.join(0.5)
        assert not said
        (place / "python_env_own").mkdir()
        assert claim.wait(60)
        reader.join(60)
        assert said == ["turn\n"]
        assert other.communicate("\n")[0] == "python_env_other\n"
    assert found == [{"python_env_own"}]


def test_who_waits_too_long_goes_without_a_turn(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(environments, "_TURN_S", 0.1)
    first: list[set[str]] = []
    second: list[set[str]] = []
    with EnvironmentClaim(first.append), EnvironmentClaim(second.append):
        (place / "python_env_one").mkdir()
    assert first == second == [{"python_env_one"}]


def test_without_a_folder_nothing_is_found_and_the_turn_is_over(place: Path) -> None:
    found: list[set[str]] = []
    with EnvironmentClaim(found.append):
        pass
    began = time.monotonic()
    with EnvironmentClaim(found.append):
        (place / "python_env_one").mkdir()
    assert found == [{"python_env_one"}]
    assert time.monotonic() - began < environments._TURN_S / 2


def test_where_nothing_can_be_locked_nobody_waits(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    found: list[set[str]] = []
    began = time.monotonic()
    with EnvironmentClaim(found.append):
        (place / "python_env_one").mkdir()
    monkeypatch.setattr(environments, "_ENVIRONMENTS", place / "absent")
    with EnvironmentClaim(found.append):
        pass
    assert found == [{"python_env_one"}]
    assert time.monotonic() - began < environments._TURN_S / 2
