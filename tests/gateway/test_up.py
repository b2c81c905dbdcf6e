"""`gateway.up` over scripted children, which say what the real one would."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway import up
from gateway.up import EmbeddedTriton, Replica, Report, plan_replicas, run_up, triton_command
from wire import events

LIVE = '{"event":"live","grpc":"127.0.0.1:1","metrics":"127.0.0.1:3"}'
OTHER_LIVE = LIVE.replace(":1", ":4")
READY = '{"event":"ready","grpc":"127.0.0.1:1","metrics":"127.0.0.1:3","repository_key":"k=v","models":["m"]}'
UNTIL_EOF = "import sys; sys.stdin.read()"
ROOT = Path(__file__).parents[2]


def child(program: str, name: str = "") -> Replica:
    """A Python program that runs in the embedded server's place; `begin()` says that it runs and is ready."""
    said = f"def begin():\n    print({LIVE!r})\n    print({READY!r})\n"
    return Replica(command=[sys.executable, "-uc", said + program], environment={"WHICH": name}, name=name)


def test_command_line() -> None:
    command = triton_command(
        model=("a=/x", "/y"), metrics_port=0, device="cuda:1", max_context=None, kv_memory_gib=1.5
    )
    assert command[:3] == [sys.executable, "-m", "triton_models.embedded"]
    assert " ".join(command[3:]) == (
        "--model a=/x --model /y --metrics-port 0 --device cuda:1 --kv-memory-gib 1.5"
    )


def plan(device: str, count: int | None, **more: object) -> list[Replica]:
    return plan_replicas(device, count, **{"metrics_port": 8002, "models": (), **more})


def flags(replica: Replica) -> str:
    return " ".join(replica.command[3:])


def test_one_replica_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (only,) = plan("cuda:1", None, models=("a=/x",), max_context=9)
    assert flags(only) == "--model a=/x --metrics-port 8002 --device cuda:1 --max-context 9"
    assert only.name == ""
    assert only.environment.keys() == {"TRITONGATE_REPOSITORY_KEY"}


def test_devices_are_given_in_turn_and_what_is_shared_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    three = plan("cuda:0,cuda:1", 3)
    assert [replica.name for replica in three] == [
        "Replica 1 (cuda:0)",
        "Replica 2 (cuda:1)",
        "Replica 3 (cuda:0)",
    ]
    assert [flags(replica) for replica in three] == [
        "--metrics-port 8002 --device cuda:0 --memory-share 0.5",
        "--metrics-port 8003 --device cuda:1",
        "--metrics-port 8004 --device cuda:0 --memory-share 0.5",
    ]
    assert {replica.environment["OMP_NUM_THREADS"] for replica in three} == {"2"}
    (key,) = {replica.environment["TRITONGATE_REPOSITORY_KEY"] for replica in three}
    assert key != plan("cpu", 1)[0].environment["TRITONGATE_REPOSITORY_KEY"]


def test_memory_is_divided_among_the_models_that_may_be_loaded_at_once() -> None:
    (only,) = plan("cuda:0", None, models=("a=/x", "b=/y", "c=/z"), load_at_start=2)
    assert flags(only).endswith("--metrics-port 8002 --load-at-start 2 --device cuda:0 --memory-share 0.5")
    for limit in (3, 9):
        (only,) = plan("cuda:0", None, models=("a=/x",), load_at_start=limit)
        assert "--memory-share" not in flags(only)


def test_what_was_chosen_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for replica in plan("cpu", 2, metrics_port=0, kv_memory_gib=1.5):
        assert flags(replica) == "--metrics-port 0 --device cpu --kv-memory-gib 1.5"
        assert "OMP_NUM_THREADS" not in replica.environment


def test_several_models_divide_a_device_too() -> None:
    assert flags(plan("cpu", 2, models=("/a", "/b"))[1]).endswith("--memory-share 0.25")


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("cuda:0,cuda:1", 1, "--replicas 1 are fewer than the devices of --device cuda:0,cuda:1"),
        ("cuda:0,auto", None, "auto stands alone"),
        ("auto,auto", None, "auto stands alone"),
    ],
)
def test_replicas_that_cannot_be_meant(device: str, count: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(device, count)


def test_serves_when_ready_and_stops_the_child() -> None:
    replica = child(f"begin(); {UNTIL_EOF}")
    seen: list[tuple[Sequence[str], events.Ready]] = []

    def serve(addresses: Sequence[str], ready: events.Ready, _: object) -> int:
        seen.append((addresses, ready))
        return 0

    out = io.StringIO()
    assert run_up([replica], serve, out) == 0
    ((addresses, ready),) = seen
    assert addresses == ["127.0.0.1:1"]
    assert ready.models == ["m"]
    assert "Triton is ready: gRPC 127.0.0.1:1" in out.getvalue()


def test_serves_all_as_soon_as_one_is_ready() -> None:
    loading = child(f"print({OTHER_LIVE!r}); {UNTIL_EOF}", "Replica 2")
    out = io.StringIO()

    def serve(addresses: Sequence[str], ready: events.Ready, _: object) -> int:
        assert addresses == ["127.0.0.1:1", "127.0.0.1:4"]
        assert ready.models == ["m"]
        return 0

    assert run_up([child(f"begin(); {UNTIL_EOF}", "Replica 1"), loading], serve, out) == 0
    assert "Replica 1: Triton is ready" in out.getvalue()
    assert "Replica 2: Triton is ready" not in out.getvalue()


def test_a_child_that_fails_to_start_is_the_reason() -> None:
    replica = child("""print('{"event":"failed","message":"no such model"}'); raise SystemExit(1)""")
    out = io.StringIO()
    assert run_up([replica], _must_not_serve, out) == 1
    assert out.getvalue() == "Error: no such model\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [("raise SystemExit(3)", "status 3"), ("import os; os.kill(os.getpid(), 9)", "signal 9")],
)
def test_of_several_the_one_that_failed_is_named(program: str, reason: str) -> None:
    out = io.StringIO()
    replicas = [child(f"print({LIVE!r}); {UNTIL_EOF}", "Replica 1"), child(program, "Replica 2")]
    assert run_up(replicas, _must_not_serve, out) == 1
    assert out.getvalue().startswith("Error: Replica 2: the process of the embedded Triton ended by itself")
    assert reason in out.getvalue()


def test_a_replica_that_fails_to_start_while_another_serves_ends_the_gateway(tmp_path: Path) -> None:
    late = f"""print({OTHER_LIVE!r})
import pathlib, time
while not pathlib.Path({str(tmp_path / "serving")!r}).exists(): time.sleep(0.02)
"""

    def serve(addresses: Sequence[str], ready: events.Ready, _: object) -> int:
        (tmp_path / "serving").touch()
        return _serve_until_sigterm(addresses, ready)

    out = io.StringIO()
    assert run_up([child(f"begin(); {UNTIL_EOF}", "Replica 1"), child(late, "Replica 2")], serve, out) == 1
    assert "Error: Replica 2: the process of the embedded Triton ended" in out.getvalue()


def test_a_child_that_dies_later_is_started_again_on_its_ports_and_the_others_serve_on(
    tmp_path: Path,
) -> None:
    dies = f"""
import os, pathlib, sys, time
lives = pathlib.Path({str(tmp_path / "lives")!r})
with lives.open("a") as file: file.write(" ".join(sys.argv[1:]) + "\\n")
begin()
if len(lives.read_text().splitlines()) == 1: os.kill(os.getpid(), 9)
{UNTIL_EOF}"""
    out = io.StringIO()

    def serve(addresses: Sequence[str], *_: object) -> int:
        while out.getvalue().count("Replica 2: Triton is ready") < 2:
            time.sleep(0.02)
        return len(addresses)

    assert run_up([child(f"begin(); {UNTIL_EOF}", "Replica 1"), child(dies, "Replica 2")], serve, out) == 2
    assert "Replica 2: Triton is down (the process of the embedded Triton ended by itself" in out.getvalue()
    assert (tmp_path / "lives").read_text().splitlines() == ["", "--grpc-port 1 --metrics-port 3"]
    assert out.getvalue().count("Replica 1: Triton is ready") == 1


def test_a_child_that_was_ready_is_started_again_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "_FIRST_PAUSE_S", 0.01)
    dies = f"""
import os, pathlib, time
lives = pathlib.Path({str(tmp_path / "lives")!r})
with lives.open("a") as file: file.write(".")
number = len(lives.read_text())
if number in (1, 5): begin()
if number == 2: print('{{"event":"failed","message":"no memory"}}'); raise SystemExit(1)
if number == 5: {UNTIL_EOF}
os.kill(os.getpid(), 9)"""
    out = io.StringIO()

    def serve(addresses: Sequence[str], *_: object) -> int:
        while out.getvalue().count("Replica 2: Triton is ready") < 2:
            time.sleep(0.02)
        return len(addresses)

    assert run_up([child(f"begin(); {UNTIL_EOF}", "Replica 1"), child(dies, "Replica 2")], serve, out) == 2
    downs = [line for line in out.getvalue().splitlines() if "Triton is down" in line]
    assert [line.rpartition("starting it again in ")[2] for line in downs] == [
        "0 s",
        "0.01 s",
        "0.02 s",
        "0.04 s",
    ]
    assert "(no memory)" in downs[1]


def test_a_stop_ends_the_pause_before_a_child_is_started_again(tmp_path: Path) -> None:
    dies = f"""
import os, pathlib, time
if not (seen := pathlib.Path({str(tmp_path / "seen")!r})).exists():
    seen.touch()
    begin()
    time.sleep(0.3)  # or nobody would see that it was ready
os.kill(os.getpid(), 9)"""
    out = io.StringIO()

    def serve(*_: object) -> int:
        while "in 4 s" not in out.getvalue():
            time.sleep(0.02)
        return 0

    assert run_up([child(dies)], serve, out) == 0
    for thread in [each for each in threading.enumerate() if each.name == "triton-events"]:
        thread.join(2)
        assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts_stops_it(number: int, tmp_path: Path) -> None:
    replica = child(f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); {UNTIL_EOF}")
    # A shell's background job, which this run may be part of, inherits that a signal is ignored.
    inherited = signal.signal(number, signal.default_int_handler)
    threading.Thread(target=_signal_once_written, args=(tmp_path / "pid", number), daemon=True).start()
    try:
        out = io.StringIO()
        assert run_up([replica], _must_not_serve, out) == 130
        assert out.getvalue() == "stopping\n"
    finally:
        signal.signal(number, inherited)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_wait_for_an_import(number: int, tmp_path: Path) -> None:
    """Nor does the process's end, though the import loses exceptions and never ends."""
    (tmp_path / "endless.py").write_text(
        "import os, signal, sys, threading\n"
        "while not os.path.exists(sys.argv[1]):\n"
        "    pass\n"
        "try:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "except BaseException:  # as some extension modules do\n"
        "    pass\n"
        "threading.Event().wait()\n"
    )
    pid = tmp_path / "pid"
    begun = f"import os; open({str(pid)!r} + '_', 'w').write(str(os.getpid())); "
    begun += f"os.rename({str(pid)!r} + '_', {str(pid)!r}); {UNTIL_EOF}"
    program = (
        "import importlib, signal, sys\n"
        "from gateway.up import Replica, run_up\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"child = Replica(command=[sys.executable, '-c', {begun!r}], environment={{}})\n"
        "load = lambda: importlib.import_module('endless')\n"
        "run_up([child], None, sys.stdout, meanwhile=load)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, pid],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "stopping\n", "")
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_what_fails_meanwhile_ends_the_start() -> None:
    def fail() -> None:
        raise ImportError("broken")

    with pytest.raises(ImportError, match="broken"):
        run_up([child(UNTIL_EOF)], _must_not_serve, io.StringIO(), meanwhile=fail)


def test_a_signal_amid_the_start_of_a_child_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    original = EmbeddedTriton._start

    def start(triton: EmbeddedTriton) -> subprocess.Popen[bytes]:
        process = original(triton)
        started.append(process)
        if started[0] is process:  # a second signal would end the wait
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(EmbeddedTriton, "_start", start)
    out = io.StringIO()
    assert run_up([child(UNTIL_EOF), child(UNTIL_EOF)], _must_not_serve, out) == 130
    assert out.getvalue() == "stopping\n"
    assert started
    assert not [process.pid for process in started if Path(f"/proc/{process.pid}").exists()]


def test_a_child_that_cannot_be_started_is_the_reason() -> None:
    out = io.StringIO()
    absent = Replica(command=["/absent"], environment={}, name="Replica 1")
    assert run_up([absent], _must_not_serve, out) == 1
    assert out.getvalue() == (
        "Error: Replica 1: the process of the embedded Triton could not be started "
        "(No such file or directory)\n"
    )


def test_a_forced_end_does_not_wait_for_the_child(tmp_path: Path) -> None:
    ignore = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    pid = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    replica = child(f"{ignore}; {pid}; begin(); {UNTIL_EOF}; time.sleep(60)")
    began = time.monotonic()
    assert run_up([replica], lambda *_: 130, io.StringIO()) == 130
    assert time.monotonic() - began < 60
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # an error if it is gone


def test_the_child_is_out_of_reach_of_the_terminals_signals(tmp_path: Path) -> None:
    group = f"import os; open({str(tmp_path / 'group')!r}, 'w').write(str(os.getpgid(0)))"
    assert run_up([child(f"{group}; begin(); {UNTIL_EOF}")], lambda *_: 0, io.StringIO()) == 0
    assert int((tmp_path / "group").read_text()) != os.getpgid(0)


def test_report_rewrites_one_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    report = Report(out)
    report(events.Loading("m", 0.0))
    report(events.Loading("m", 1.0, 0.43, "12.5GB"))
    report(events.Loading("m", 2.0, 1.0, "12.5GB"))
    report(events.ModelUp("m"))
    erase = "\r\x1b[K"
    shown = [
        "Loading m (0 s)",
        "Loading m 43% of 12.5GB (1 s)",
        "Warming up m (2 s)",
    ]
    assert out.getvalue() == erase.join([*shown, "Model m is up again\n"])


def test_report_elsewhere_says_loading_now_and_then() -> None:
    out = io.StringIO()
    report = Report(out)
    for second in range(3):
        report(events.Loading("m", float(second)))
    report(events.Notice("n"))
    report(events.Starting("/log"))
    report(events.ModelDown("m", "r"))
    report(events.ServerDown("r", 0.5))
    report(events.ServerUp())
    assert out.getvalue().splitlines() == [
        "Loading m (0 s)",
        "n",
        "Starting Triton (log: /log)",
        "Model m is down (r); loading it again",
        "Triton is down (r); starting it again in 0.5 s",
        "Triton is up again",
    ]


def test_other_output_of_the_child_is_shown() -> None:
    out = io.StringIO()
    run_up([child(f"print('what is this'); begin(); {UNTIL_EOF}")], lambda *_: 0, out)
    assert out.getvalue().startswith("what is this\n")


def test_the_child_is_not_told_the_keys_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONGATE_API_KEYS", '[{"name": "a", "key": "s3cret"}]')
    tells = "import os; print('s3cret' in str(os.environ), os.environ['WHICH'], 'PATH' in os.environ)"
    out = io.StringIO()
    run_up([child(f"{tells}; begin(); {UNTIL_EOF}", "own")], lambda *_: 0, out)
    assert out.getvalue().startswith("own: False own True\n")


def _must_not_serve(*_: object) -> int:
    raise AssertionError


def _serve_until_sigterm(*_: object) -> int:
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        assert ended.wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _signal_once_written(path: Path, number: int) -> None:
    while not (path.exists() and path.read_text()):
        time.sleep(0.02)
    os.kill(os.getpid(), number)
