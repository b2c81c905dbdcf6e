"""The part of `tritongate up` that runs Triton: a child process, its events, and its end.

The child is `python -m triton_models.embedded`, in its own session, so that a terminal's Ctrl-C reaches only
this process, and the gateway drains before Triton stops. It stops by itself when this process is gone: its
standard input is a pipe from here. This module imports nothing of it; they share only `wire.events`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TextIO, assert_never

import msgspec

from wire import events
from wire.events import Event, Ready

_STOP_TIMEOUT_S = 8.0
"""The child's own limit is some two seconds shorter."""
_LOADING_EVERY_S = 10.0
"""Between two lines about one model, if the output is not a terminal."""
_LOOK_EVERY_S = 0.2
"""While waiting on the main thread. A signal that comes just before a wait begins does not end it, and its
handler, which runs on that thread, would wait as long."""
_SIGNALLED = 128
_ENGINE_LIMITS = (
    "max_context",
    "max_running",
    "max_batched_tokens",
    "burst_tokens",
    "burst_steps",
    "kv_memory_gib",
)


class TritonFailedError(Exception):
    """The embedded Triton did not start, or ended unexpectedly; the message is one line for the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonOptions:
    """The options that `tritongate up` passes on."""

    models: tuple[str, ...] = ()
    """`[NAME=]DIR` of each; none: the built-in one."""
    metrics_port: int = 8002
    """0 is any free port."""
    device: str = "auto"
    dtype: str = "auto"
    max_context: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    burst_tokens: int | None = None
    burst_steps: int | None = None
    kv_memory_gib: float | None = None
    """These six: limits of each engine; None leaves them to it."""
    trace_endpoint: str | None = None
    """Where Triton and the models send their spans; None: there are none."""

    def command(self) -> list[str]:
        """Return the child's command line."""
        command = [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin"]
        # What its log would say comes as events.
        command += ["--log-level", "critical", "--device", self.device, "--dtype", self.dtype]
        command += ["--metrics-port", str(self.metrics_port)]
        for name in _ENGINE_LIMITS:
            if (value := getattr(self, name)) is not None:
                command += ["--" + name.replace("_", "-"), str(value)]
        if self.trace_endpoint is not None:
            command += ["--trace-endpoint", self.trace_endpoint]
        for model in self.models:
            command += ["--model", model]
        return command


class Report:
    """Shows the child's progress: in lines, on a terminal as one line rewritten while models load."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rewrites = out.isatty()
        self._open_line = False
        self._loading: tuple[str, float] = ("", 0.0)

    def __call__(self, event: Event) -> None:
        """Show `event`."""
        match event:
            case events.Loading(model=model, elapsed_s=elapsed_s):
                self._show_loading(model, elapsed_s, _loading_text(event))
            case events.Notice(message=message):
                self.say(message)
            case events.Starting(log=log):
                self.say(f"Starting Triton (log: {log})")
            case events.Ready():
                self.say(f"Triton is ready: gRPC {event.grpc}, metrics {event.metrics}")
            case events.ModelDown(model=model, reason=reason):
                self.say(f"Model {model} is down ({reason}); loading it again")
            case events.ModelUp(model=model):
                self.say(f"Model {model} is up again")
            case events.ServerDown(reason=reason, retry_in_s=retry_in_s):
                self.say(f"Triton is down ({reason}); starting it again in {retry_in_s:g} s")
            case events.ServerUp():
                self.say("Triton is up again")
            case events.Failed():
                pass  # becomes the exception's message
            case _:
                assert_never(event)

    def say(self, line: str) -> None:
        """Show a line."""
        self._write(line + "\n")
        self._open_line = False

    def _show_loading(self, model: str, elapsed_s: float, text: str) -> None:
        if self._rewrites:
            self._write(text)
            self._open_line = True
            return
        now = time.monotonic()
        shown, at = self._loading
        if shown != model or elapsed_s == 0 or now - at >= _LOADING_EVERY_S:
            self._loading = (model, now)
            self.say(text)

    def _write(self, text: str) -> None:
        erase = "\r\x1b[K" if self._open_line else ""
        # Go on serving when the terminal goes away.
        with contextlib.suppress(OSError):
            self._out.write(erase + text)
            self._out.flush()


class EmbeddedTriton:
    """The child process, as a context manager: started on entry, stopped on exit. For the main thread.

    When the child ends by itself after it was ready, `failure` says why and this process gets a SIGTERM, so
    that whatever serves in the context drains and returns.
    """

    def __init__(self, options: TritonOptions, report: Callable[[Event], None]) -> None:
        self.failure: str | None = None
        """Why the child ended, if it did so unexpectedly."""
        self._report = report
        self._ready: Ready | None = None
        self._decided = threading.Event()
        """Set when the child is ready or has ended."""
        self._leaving = False
        self._abandoned = False
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self._options.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        threading.Thread(
            target=self._follow, args=(self._process,), name="triton-events", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> Ready:
        """Wait, however long loading takes, until every model answers.

        Raises:
            TritonFailedError: the child ended instead.
        """
        while not self._decided.wait(_LOOK_EVERY_S):
            pass
        if self.failure is not None or self._ready is None:
            raise TritonFailedError(self.failure)
        return self._ready

    def stop(self) -> None:
        """Stop the child and wait for its end, ten seconds at most; do nothing for one that was abandoned."""
        if self._process is None or self._abandoned:
            return
        self._leaving = True
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Its own children end with it: the kernel takes care of that.
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def abandon(self) -> None:
        """Have the child stop and, on exit, do not wait for it."""
        self._leaving = self._abandoned = True
        if self._process is not None:
            self._process.terminate()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Read the child's events until it ends; on a thread of its own."""
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        with process.stdout as lines:
            for line in lines:
                self._take(line)
        status = process.wait()
        if self._leaving:
            self._decided.set()
            return
        if self.failure is None:
            how = f"killed by signal {-status}" if status < 0 else f"status {status}"
            self.failure = f"the process of the embedded Triton ended by itself ({how})"
        if self._decided.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        self._decided.set()

    def _take(self, line: bytes) -> None:
        try:
            event = events.decode_event(line)
        except msgspec.MsgspecError:
            # Not an event, but worth showing.
            event = events.Notice(line.decode(errors="replace").rstrip())
        self._report(event)
        if isinstance(event, events.Failed):
            self.failure = event.message
        elif isinstance(event, events.Ready):
            self._ready = event
            self._decided.set()


def run_up(options: TritonOptions, serve: Callable[[Ready], int], out: TextIO) -> int:
    """Run Triton and, once it is ready, `serve` in front of it; return the process's exit status.

    SIGTERM and SIGINT stop a Triton that is still starting; while `serve` runs, it handles them. One that
    comes while Triton stops ends this process at once, and Triton a little later.

    Args:
        options: what Triton serves.
        serve: runs the gateway in front of the address and models it is given, until a signal; returns the
            exit status, above 128 where a second signal cut the drain short.
        out: where progress is shown.
    """
    report = Report(out)
    triton = EmbeddedTriton(options, report)
    status = 1
    try:
        with _interrupted_by_sigterm(), triton:
            status = serve(triton.wait_ready())
            if status > _SIGNALLED:
                triton.abandon()
    except TritonFailedError:
        pass  # said below
    except KeyboardInterrupt:
        status = _SIGNALLED + signal.SIGINT
    if triton.failure is not None:
        report.say(f"Error: {triton.failure}")
        return 1
    return status


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt, as SIGINT does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _loading_text(event: events.Loading) -> str:
    share = "" if event.progress is None else f" {event.progress:.0%}"
    return f"Loading {event.model}{share} ({event.elapsed_s:.0f} s)"
