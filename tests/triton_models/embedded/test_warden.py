import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from triton_models.embedded import warden
from triton_models.embedded.warden import RunDirectory


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
    living = RunDirectory.create(places["tmp"])
    dead = RunDirectory.create(places["tmp"])
    for run in (living, dead):
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
    assert {path.name for path in new.path.parent.iterdir()} == {living.path.name, new.path.name}
    assert {path.name for path in places["shm"].iterdir()} == {f"{living.shared_memory_prefix}1", "other"}


def test_those_that_start_together_do_not_take_each_other_for_stale(places: dict[str, Path]) -> None:
    program = """
import sys
import time
from pathlib import Path
from triton_models.embedded.warden import RunDirectory
sys.stdin.readline()
runs = [RunDirectory.create(Path(sys.argv[1])) for _ in range(50)]
print(all(folder.is_dir() for run in runs for folder in (run.repository, run.temporary)), flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", program, str(places["tmp"])]
    together = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
    for _ in range(2):  # begin; and end only when all have created theirs
        for each in together:
            assert each.stdin is not None
            each.stdin.write(b"\n")
            each.stdin.flush()
        for each in together:
            assert each.stdout is not None
            assert each.stdout.readline() in {b"True\n", b""}
    for each in together:
        each.communicate()
        assert each.returncode == 0


@pytest.mark.parametrize("serving", [True, False])
def test_empty_environments_go_with_the_last_server(
    places: dict[str, Path], run: RunDirectory, monkeypatch: pytest.MonkeyPatch, *, serving: bool
) -> None:
    (places["environments"] / "python_env_a").mkdir()
    (places["environments"] / "python_env_b" / "lib").mkdir(parents=True)
    (places["environments"] / "other").mkdir()
    lines = {1: ["/sbin/init"], 2: ["python", "warden.py", "/bin/tritonserver"]}
    lines |= {3: ["/opt/tritonserver/bin/tritonserver", "--grpc-port=1"]} if serving else {}
    monkeypatch.setattr(warden, "command_lines", lambda: lines)
    run.clean()
    left = {path.name for path in places["environments"].iterdir()}
    assert left == {"python_env_b", "other"} | ({"python_env_a"} if serving else set())


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
import contextlib, runpy, sys
with contextlib.suppress(SystemExit):
    sys.argv[1:] = ["--help"]
    runpy.run_module("triton_models.embedded", run_name="__main__")
import triton_models.entries
wanted, unwanted = {"triton_models.embedded.supervisor"}, {"torch", "numpy", "transformers", "psutil"}
print(sorted((wanted | unwanted) & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n['triton_models.embedded.supervisor']\n")


def of(run: RunDirectory, parent: int) -> list[str]:
    """Return the command of a warden, up to that of its server."""
    return [sys.executable, "-I", "-S", warden.__file__, str(parent), str(run.path)]


def test_a_parent_that_died_first_leaves_nothing(run: RunDirectory, tmp_path: Path) -> None:
    """Before the warden could ask the kernel to be told of it."""
    assert subprocess.run([*of(run, 1), "/bin/touch", str(tmp_path / "x")], check=False).returncode == 0
    assert not run.path.exists()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -ABRT $$", 128 + 6)])
def test_the_status_says_how_the_server_ended(run: RunDirectory, script: str, status: int) -> None:
    assert subprocess.run([*of(run, os.getpid()), "/bin/sh", "-c", script], check=False).returncode == status
    assert run.path.exists()


def test_a_server_that_does_not_stop_is_killed(run: RunDirectory) -> None:
    command = of(run, os.getpid())
    script = "trap '' TERM; echo; while :; do sleep 0.1; done"
    with subprocess.Popen([*command, "/bin/sh", "-c", script], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"\n"
        began = time.monotonic()
        started.terminate()
        assert started.wait(20) == 128 + 9
        assert time.monotonic() - began >= warden.GRACE_S


def test_nothing_outlives_it_that_the_server_had_started(run: RunDirectory) -> None:
    """Nothing in these processes' command lines tells whose they are, as in one that is about to exit."""
    told = run.path / "told"
    inner = f"sleep 300 & echo $! >{told}; exec sleep 300"
    script = f"({inner}) & echo $!; until [ -s {told} ]; do sleep 0.01; done; cat {told}"
    command = [*of(run, os.getpid()), "/bin/sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        output, _ = started.communicate(timeout=100)  # to its end: nobody has it open
        assert started.returncode == 0
    left = output.split()
    assert len(left) == 2
    assert not any(psutil.pid_exists(int(pid)) for pid in left)


def test_logs_of_failed_starts_outlive_the_next_ones(places: dict[str, Path]) -> None:
    kept = []
    for number in range(8):
        run = RunDirectory.create(places["tmp"])
        run.log.write_text(str(number))
        kept.append(run.keep_log())
        run.remove()
        owner_dies(run)
    RunDirectory.create(places["tmp"])
    assert [path.read_text() for path in kept if path.exists()] == ["3", "4", "5", "6", "7"]
