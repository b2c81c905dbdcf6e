import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from triton_models.embedded import environments, rundir
from triton_models.embedded.rundir import RunDirectory


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("tmp", "shm", "environments")}
    for folder in found.values():
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(found["tmp"]))
    monkeypatch.setattr(rundir, "_SHARED_MEMORY", found["shm"])
    monkeypatch.setattr(environments, "_ENVIRONMENTS", found["environments"])
    return found


def test_a_living_owner_is_left_alone_and_a_dead_ones_leftovers_are_removed(places: dict[str, Path]) -> None:
    alive = RunDirectory.create()
    dead = RunDirectory.create()
    with dead.claim_environments():
        (places["environments"] / "python_env_dead").mkdir()
    (places["environments"] / "python_env_other").mkdir()
    for run in (alive, dead):
        (places["shm"] / f"{run.shared_memory_prefix}1").touch()
    (places["shm"] / "other").touch()
    orphan = subprocess.Popen([sys.executable, "-c", "input()", f"{dead.backends}/x"], stdin=subprocess.PIPE)
    dead._release()  # as the kernel does when its process ends

    new = RunDirectory.create()
    assert not psutil.pid_exists(orphan.pid)
    orphan.wait(10)
    assert orphan.stdin is not None
    orphan.stdin.close()
    assert {path.name for path in new.path.parent.iterdir()} == {alive.path.name, new.path.name}
    assert {path.name for path in places["shm"].iterdir()} == {f"{alive.shared_memory_prefix}1", "other"}
    assert [path.name for path in places["environments"].iterdir()] == ["python_env_other"]


def test_a_claimed_environment_in_use_stays(places: dict[str, Path]) -> None:
    run = RunDirectory.create()
    with run.claim_environments():
        (places["environments"] / "python_env_a" / "lib").mkdir(parents=True)
    run.remove_leftovers()
    assert (places["environments"] / "python_env_a").exists()


def test_each_life_of_a_server_claims_what_its_first_load_makes(places: dict[str, Path]) -> None:
    run = RunDirectory.create()
    for life in ("first", "second"):
        with run.claim_environments(), run.claim_environments():  # side by side
            (places["environments"] / f"python_env_{life}").mkdir()
        with run.claim_environments():
            (places["environments"] / f"python_env_beside_{life}").mkdir()  # somebody else's
        run.remove_leftovers()
    left = {path.name for path in places["environments"].iterdir()}
    assert left == {"python_env_beside_first", "python_env_beside_second"}


def test_the_log_can_outlive_the_rest() -> None:
    run = RunDirectory.create()
    run.log.touch()
    (run.repository / "m").mkdir()
    run.remove(keep_log=True)
    assert run.log.exists()
    assert not run.repository.exists()
    run.remove()
    assert not run.path.exists()


def test_somebody_elses_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory.create()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        _create_in_the_folder_of(owner)


def _create_in_the_folder_of(owner: int) -> None:
    parent = Path(rundir.tempfile.gettempdir())
    (parent / f"tritongate-{owner}").rename(parent / f"tritongate-{os.getuid()}")
    RunDirectory.create()


def test_a_link_in_its_place_is_refused(places: dict[str, Path]) -> None:
    own = places["tmp"] / "own"
    (own / "precious").mkdir(parents=True)
    (places["tmp"] / f"tritongate-{os.getuid()}").symlink_to(own)
    with pytest.raises(PermissionError, match="belongs to another user"):
        RunDirectory.create()
    assert (own / "precious").exists()


def test_whoever_reads_the_log_is_left_alone() -> None:
    run = RunDirectory.create()
    reader = subprocess.Popen([sys.executable, "-c", "input()", str(run.log)], stdin=subprocess.PIPE)
    try:
        assert psutil.Process(reader.pid) not in run.processes()
    finally:
        reader.communicate()
