"""`gateway.up` over scripted children, which say what the real one would."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.up import EmbeddedTriton, Report, TritonFailedError, TritonOptions, run_up
from wire import events

READY = '{"event":"ready","grpc":"127.0.0.1:1","metrics":"127.0.0.1:3","repository_key":"k=v","models":["m"]}'
UNTIL_EOF = "import sys; sys.stdin.read()"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the given Python program run in the embedded server's place."""

    def use(program: str) -> None:
        monkeypatch.setattr(TritonOptions, "command", lambda _: [sys.executable, "-uc", program])

    return use


def test_command_line() -> None:
    options = TritonOptions(
        models=("a=/x", "/y"),
        metrics_port=0,
        device="cuda:1",
        dtype="float32",
        max_running=512,
        kv_memory_gib=1.5,
    )
    command = options.command()
    assert command[:4] == [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin"]
    assert " ".join(command[4:]) == (
        "--log-level critical --device cuda:1 --dtype float32 --metrics-port 0 --max-running 512 "
        "--kv-memory-gib 1.5 --model a=/x --model /y"
    )


def test_serves_when_ready_and_stops_the_child(child: Callable[[str], None]) -> None:
    child(f"print('{READY}'); {UNTIL_EOF}")
    seen: list[events.Ready] = []

    def serve(ready: events.Ready) -> int:
        seen.append(ready)
        return 0

    out = io.StringIO()
    assert run_up(TritonOptions(), serve, out) == 0
    assert seen[0].grpc == "127.0.0.1:1"
    assert seen[0].models == ["m"]
    assert "Triton is ready: gRPC 127.0.0.1:1" in out.getvalue()


def test_a_child_that_fails_to_start_is_the_reason(child: Callable[[str], None]) -> None:
    child("""print('{"event":"failed","message":"no such model"}'); raise SystemExit(1)""")
    out = io.StringIO()
    assert run_up(TritonOptions(), _must_not_serve, out) == 1
    assert out.getvalue() == "Error: no such model\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [("raise SystemExit(3)", "status 3"), ("import os; os.kill(os.getpid(), 9)", "signal 9")],
)
def test_a_child_that_ends_without_a_word(child: Callable[[str], None], program: str, reason: str) -> None:
    child(program)
    with (
        EmbeddedTriton(TritonOptions(), lambda _: None) as triton,
        pytest.raises(TritonFailedError, match=reason),
    ):
        triton.wait_ready()


def test_a_child_that_dies_later_ends_the_gateway(child: Callable[[str], None]) -> None:
    child(f"print('{READY}'); import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)")
    out = io.StringIO()
    assert run_up(TritonOptions(), _serve_until_sigterm, out) == 1
    assert "ended by itself (killed by signal 9)" in out.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_stops_it(
    child: Callable[[str], None], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); {UNTIL_EOF}")
    # A shell's background job, which this run may be part of, inherits that SIGINT is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting, original = threading.Event(), EmbeddedTriton.wait_ready

    def wait_ready(triton: EmbeddedTriton) -> events.Ready:
        waiting.set()
        return original(triton)

    def send() -> None:
        waiting.wait()  # else it could come amid the start of the child, which nobody has a hold of then
        _signal_once_written(tmp_path / "pid", number)

    monkeypatch.setattr(EmbeddedTriton, "wait_ready", wait_ready)
    threading.Thread(target=send, daemon=True).start()
    try:
        assert run_up(TritonOptions(), _must_not_serve, io.StringIO()) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forced_end_does_not_wait_for_the_child(child: Callable[[str], None]) -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child(f"{ignore}; print('{READY}'); {UNTIL_EOF}; time.sleep(0.5)")
    kept: list[EmbeddedTriton] = []
    original = EmbeddedTriton.abandon

    def abandon(triton: EmbeddedTriton) -> None:
        kept.append(triton)
        original(triton)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedTriton, "abandon", abandon)
        assert run_up(TritonOptions(), lambda _: 130, io.StringIO()) == 130
    process = kept[0]._process
    assert process is not None
    assert process.poll() is None
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_the_child_is_out_of_reach_of_the_terminals_signals(child: Callable[[str], None]) -> None:
    child(f"print('{READY}'); {UNTIL_EOF}")
    with EmbeddedTriton(TritonOptions(), lambda _: None) as triton:
        triton.wait_ready()
        assert triton._process is not None
        assert os.getpgid(triton._process.pid) != os.getpgid(0)


def test_report_rewrites_one_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    report = Report(out)
    report(events.Loading("m", 0.0))
    report(events.Loading("m", 1.0, 0.43))
    report(events.ModelUp("m"))
    assert out.getvalue() == ("Loading m (0 s)\r\x1b[KLoading m 43% (1 s)\r\x1b[KModel m is up again\n")


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


def test_other_output_of_the_child_is_shown(child: Callable[[str], None]) -> None:
    child(f"print('what is this'); print('{READY}'); {UNTIL_EOF}")
    out = io.StringIO()
    run_up(TritonOptions(), lambda _: 0, out)
    assert out.getvalue().startswith("what is this\n")


def _must_not_serve(_: events.Ready) -> int:
    raise AssertionError


def _serve_until_sigterm(_: events.Ready) -> int:
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
