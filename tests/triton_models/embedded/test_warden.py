import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_models.embedded import warden
from triton_models.embedded.warden import RunDirectory, environments


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("tmp", "shm", "environments")}
    for folder in found.values():
        folder.mkdir()
    monkeypatch.setattr(warden, "_SHARED_MEMORY", found["shm"])
    monkeypatch.setattr(warden, "_ENVIRONMENTS", found["environments"])
    return found


@pytest.fixture
def run(places: dict[str, Path]) -> RunDirectory:
    return RunDirectory.create(places["tmp"])


def owner_dies(run: RunDirectory) -> None:
    """Release its lock, as the kernel does when its process ends."""
    assert run._lock is not None
    os.close(run._lock)


def test_a_living_owner_is_left_alone_and_a_dead_ones_leftovers_are_removed(places: dict[str, Path]) -> None:
    alive = RunDirectory.create(places["tmp"])
    dead = RunDirectory.create(places["tmp"])
    before = environments()
    (places["environments"] / "python_env_dead").mkdir()
    dead.claim_environment(before)
    (places["environments"] / "python_env_other").mkdir()
    for run in (alive, dead):
        (places["shm"] / f"{run.shared_memory_prefix}1").touch()
    (places["shm"] / "other").touch()
    program = "print(flush=True); input()"
    orphan = subprocess.Popen(
        [sys.executable, "-c", program, f"{dead.backends}/x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert orphan.stdout is not None
    assert orphan.stdout.readline() == b"\n"
    owner_dies(dead)

    new = RunDirectory.create(places["tmp"])
    assert orphan.wait(10) == -9
    orphan.communicate()
    assert {path.name for path in new.path.parent.iterdir()} == {alive.path.name, new.path.name}
    assert {path.name for path in places["shm"].iterdir()} == {f"{alive.shared_memory_prefix}1", "other"}
    assert [path.name for path in places["environments"].iterdir()] == ["python_env_other"]


def test_a_claimed_environment_in_use_stays(places: dict[str, Path], run: RunDirectory) -> None:
    (places["environments"] / "python_env_a" / "lib").mkdir(parents=True)
    run.claim_environment(set())
    run.remove_leftovers()
    assert (places["environments"] / "python_env_a").exists()


def test_each_life_of_a_server_claims_what_its_first_load_makes(
    places: dict[str, Path], run: RunDirectory
) -> None:
    for life in ("first", "second"):
        before = environments()
        run.claim_environment(before)  # it is not there yet
        (places["environments"] / f"python_env_{life}").mkdir()
        run.claim_environment(before)
        (places["environments"] / f"python_env_beside_{life}").mkdir()  # somebody else's
        run.claim_environment(before)
        run.remove_leftovers()
    left = {path.name for path in places["environments"].iterdir()}
    assert left == {"python_env_beside_first", "python_env_beside_second"}


def test_the_log_can_outlive_the_rest(run: RunDirectory) -> None:
    run.log.touch()
    (run.repository / "m").mkdir()
    run.remove(keep_log=True)
    assert run.log.exists()
    assert not run.repository.exists()
    run.remove()
    assert not run.path.exists()


def test_somebody_elses_folder_is_refused(
    places: dict[str, Path], run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    run.path.parent.rename(places["tmp"] / f"tritongate-{owner + 1}")
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        RunDirectory.create(places["tmp"])


def test_a_link_in_its_place_is_refused(places: dict[str, Path]) -> None:
    own = places["tmp"] / "own"
    (own / "precious").mkdir(parents=True)
    (places["tmp"] / f"tritongate-{os.getuid()}").symlink_to(own)
    with pytest.raises(PermissionError, match="belongs to another user"):
        RunDirectory.create(places["tmp"])
    assert (own / "precious").exists()


def test_whoever_reads_the_log_is_left_alone(run: RunDirectory) -> None:
    reader = subprocess.Popen([sys.executable, "-c", "input()", str(run.log)], stdin=subprocess.PIPE)
    try:
        assert reader.pid not in run.processes()
    finally:
        reader.communicate()


def test_the_supervisor_imports_neither_torch_nor_numpy() -> None:
    program = """
import sys
from triton_models.embedded import __main__
__main__._spare_numpy()
from triton_models.embedded import supervisor
import triton_models.entries
print(sorted({"torch", "numpy", "transformers", "psutil"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
