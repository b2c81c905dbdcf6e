"""The part of `tritongate up` that runs Tritons: for each a child process, its events, and its end.

A child is `python -m triton_models.embedded`, in its own session, so that a terminal's Ctrl-C reaches only
this process, and the gateway drains before Triton stops. It stops by itself when this process is gone: its
standard input is a pipe from here. This module imports nothing of it; they share only `wire.events`.

Several replicas are several children, which know nothing of each other.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Self, TextIO, assert_never

import msgspec

from wire import events
from wire.events import Event, Ready

_STOP_TIMEOUT_S = 12.0
"""The child's own limit is some two seconds shorter."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Between two attempts to start a child again that was ready once."""
_LOADING_EVERY_S = 10.0
"""Between two lines about one model, if the output is not a terminal."""
_LOOK_EVERY_S = 0.05
"""While waiting on the main thread. A signal that comes just before a wait begins does not end it, and its
handler, which runs on that thread, would wait as long."""
_SIGNALLED = 128
_AUTO = "auto"
_KEYS_VARIABLE = "TRITONGATE_API_KEYS"
"""Clients' keys are the gateway's alone."""
METRICS_PORT: Final = 8002


class TritonFailedError(Exception):
    """An embedded Triton did not start, or ended for good; the message is one line for the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One Triton to be run: what starts its process."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables, beside those of this process."""
    name: str = ""
    """In messages; empty: the only one."""


def plan_replicas(
    device: str,
    count: int | None,
    *,
    metrics_port: int,
    models: Sequence[str],
    load_at_start: int | None = None,
    **options: object,
) -> list[Replica]:
    """Return the Tritons to run.

    They have one key in common, and divide what they share: the machine's CPUs, unless OMP_NUM_THREADS says
    how many each uses, and a device's memory, unless the options say how much each KV cache takes.

    Args:
        device: `auto`, or devices with commas between them, to which replicas are given in turn.
        count: how many; None: one a device.
        metrics_port: the first one's; the others have those that follow. 0: any free ones.
        models: what each of them serves, as `--model` has it; empty: the built-in model.
        load_at_start: how many of them it loads, which is how many it ever has loaded at once; None: all.
        options: the child's other flags (see `triton_command`).

    Raises:
        ValueError: fewer replicas than devices, or `auto` among other devices; the message names the flag.
    """
    devices = device.split(",")
    if _AUTO in devices[1:] or (len(devices) > 1 and devices[0] == _AUTO):
        raise ValueError(f"--device {device}: {_AUTO} stands alone")
    count = len(devices) if count is None else count
    if count < len(devices):
        raise ValueError(f"--replicas {count} are fewer than the devices of --device {device}")
    environment = {"TRITONGATE_REPOSITORY_KEY": f"tritongate-key={secrets.token_hex(16)}"}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    places = [devices[number % len(devices)] for number in range(count)]
    replicas = []
    for number, place in enumerate(places):
        engines = places.count(place) * max(1, min(len(models), load_at_start or len(models)))
        divided = engines > 1 and options.get("kv_memory_gib") is None
        command = triton_command(
            model=tuple(models),
            metrics_port=metrics_port and metrics_port + number,
            load_at_start=load_at_start,
            device=place,
            memory_share=1 / engines if divided else None,
            **options,
        )
        name = f"Replica {number + 1} ({place})" if count > 1 else ""
        replicas.append(Replica(command=command, environment=environment, name=name))
    return replicas


def triton_command(**options: object) -> list[str]:
    """Return the child's command line.

    Args:
        options: by the names of its flags; those of a sequence are repeated, None leaves it to the child.
    """
    command = [sys.executable, "-m", "triton_models.embedded"]
    for name, value in options.items():
        for each in value if isinstance(value, tuple) else () if value is None else (value,):
            command += ["--" + name.replace("_", "-"), str(each)]
    return command


class Report:
    """Shows progress: in lines, on a terminal as one line rewritten while models load. Thread-safe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rewrites = out.isatty()
        self._open_line = False
        self._loading: dict[str, float] = {}
        """When a line about a model of a replica was last shown."""
        self._stopping = False
        self._lock = threading.RLock()

    def stopping(self) -> None:
        """Say once that it stops."""
        if not self._stopping:
            self._stopping = True
            self.say("stopping")

    def __call__(self, event: Event, replica: str = "") -> None:
        """Show `event`, of the replica that has this name."""
        text = _text(event)
        if text is None:
            return
        line = f"{replica}: {text}" if replica else text
        with self._lock:
            if isinstance(event, events.Loading):
                self._show_loading(f"{replica} {event.model}", event.elapsed_s, line)
            else:
                self.say(line)

    def say(self, line: str) -> None:
        """Show a line."""
        with self._lock:
            self._write(line + "\n")
            self._open_line = False

    def _show_loading(self, model: str, elapsed_s: float, text: str) -> None:
        if self._rewrites:
            self._write(text)
            self._open_line = True
            return
        now = time.monotonic()
        if elapsed_s == 0 or now - self._loading.get(model, -_LOADING_EVERY_S) >= _LOADING_EVERY_S:
            self._loading[model] = now
            self.say(text)

    def _write(self, text: str) -> None:
        erase = "\r\x1b[K" if self._open_line else ""
        # Go on serving when the terminal goes away.
        with contextlib.suppress(OSError):
            self._out.write(erase + text)
            self._out.flush()


def _text(event: Event) -> str | None:
    """Return what an event says in one line; None: nothing by itself."""
    text = None
    match event:
        case events.Loading(model=model, elapsed_s=elapsed_s, progress=progress, size=size):
            share = "" if progress is None else f" {progress:.0%}"
            share += "" if size is None else f" of {size}"
            doing = "Warming up" if progress == 1 else "Loading"
            text = f"{doing} {model}{'' if progress == 1 else share} ({elapsed_s:.0f} s)"
        case events.Notice(message=message):
            text = message
        case events.Starting(log=log):
            text = f"Starting Triton (log: {log})"
        case events.Ready(grpc=grpc, metrics=metrics):
            text = f"Triton is ready: gRPC {grpc}, metrics {metrics}"
        case events.ModelDown(model=model, reason=reason):
            text = f"Model {model} is down ({reason}); loading it again"
        case events.ModelUp(model=model):
            text = f"Model {model} is up again"
        case events.ServerDown(reason=reason, retry_in_s=retry_in_s):
            text = f"Triton is down ({reason}); starting it again in {retry_in_s:g} s"
        case events.ServerUp():
            text = "Triton is up again"
        case events.Live() | events.Failed():
            pass  # the second becomes the exception's message
        case _:
            assert_never(event)
    return text


class EmbeddedTriton:
    """A replica's child process. Once it was ready, it is started again whenever it ends by itself.

    However often: other replicas may serve, and what killed it may pass, as a lack of memory does.
    A thread of its own starts it. On the main thread a signal could interrupt the start, and leave a child
    that nobody has a hold of.

    Args:
        replica: what starts the child.
        report: shown what happens.
        failed: called, on another thread, when the child has ended and was never ready.
    """

    def __init__(self, replica: Replica, report: Report, failed: Callable[[], None]) -> None:
        self.failure: str | None = None
        """Why there is no child any more, if it was never ready."""
        self.live: events.Live | None = None
        """Where the server is, from its first start on."""
        self.ready: Ready | None = None
        """What it serves; None while a child has not said so."""
        self._replica = replica
        self._report = report
        self._failed = failed
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        """Held where a child is started or told to stop."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child, unless it is told to stop before."""
        threading.Thread(target=self._follow, name="triton-events", daemon=True).start()

    def terminate(self) -> None:
        """Tell the child to stop, and start no other."""
        with self._lock:
            self._leaving.set()
            if self._process is not None:
                self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Wait for the end of a child that was told to stop; at `deadline` (`time.monotonic()`) kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Its own children end with it: the kernel takes care of that.
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        ports: list[str] = []
        if self.live is not None:  # where the gateway looks for it
            for name, address in (("grpc", self.live.grpc), ("metrics", self.live.metrics)):
                ports += [f"--{name}-port", address.rpartition(":")[2]]
        inherited = {name: value for name, value in os.environ.items() if name != _KEYS_VARIABLE}
        return subprocess.Popen(  # noqa: S603 - our own command
            [*self._replica.command, *ports],
            env={**inherited, **self._replica.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _follow(self) -> None:
        """Run a child until it ends, and so on; on a thread of its own."""
        served, pause_s = False, 0.0
        while not self._leaving.wait(pause_s):
            ended = self._run()
            if self._leaving.is_set():
                return
            if self.ready is not None:
                served, pause_s, self.ready = True, 0.0, None
            elif served:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) or _FIRST_PAUSE_S
            else:
                self.failure = f"{self._replica.name}: {ended}" if self._replica.name else ended
                self._failed()
                return
            self._report(events.ServerDown(ended, pause_s), self._replica.name)

    def _run(self) -> str:
        """Return why the child ended, or that there is none."""
        failure = None
        with self._lock:
            if self._leaving.is_set():
                return "told to stop"
            try:
                self._process = self._start()
            except OSError as error:
                return f"the process of the embedded Triton could not be started ({error.strerror})"
        with self._process as process:
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            for line in process.stdout:
                try:
                    event = events.decode_event(line)
                except msgspec.MsgspecError:
                    # Not an event, but worth showing.
                    event = events.Notice(line.decode(errors="replace").rstrip())
                self._report(event, self._replica.name)
                if isinstance(event, events.Failed):
                    failure = event.message
                elif isinstance(event, events.Live):
                    self.live = event
                elif isinstance(event, events.Ready):
                    self.ready = event
        status = process.returncode
        how = f"killed by signal {-status}" if status < 0 else f"status {status}"
        return failure or f"the process of the embedded Triton ended by itself ({how})"


class EmbeddedTritons:
    """All replicas, as a context that stops on exit what `start` has started. For the main thread.

    When one fails for good while something serves in the context, this process gets a SIGTERM, so that it
    drains and returns.
    """

    def __init__(self, replicas: Sequence[Replica], report: Report) -> None:
        self._report = report
        self._tritons = [EmbeddedTriton(replica, report, self._end_serving) for replica in replicas]
        self._decided = False
        self._abandoned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self._report.stopping()
        for triton in self._tritons:
            triton.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for triton in () if self._abandoned else self._tritons:
            triton.wait(deadline)

    def start(self) -> None:
        """Start all, side by side. In the context: an exception on entry would keep it from its exit."""
        for triton in self._tritons:
            triton.start()

    @property
    def failure(self) -> str | None:
        """Why one is gone for good."""
        return next((triton.failure for triton in self._tritons if triton.failure is not None), None)

    def wait_ready(self) -> tuple[list[str], Ready]:
        """Wait until all servers run, and on one of them, however long loading takes, every model answers.

        Returns the gRPC addresses of all of them, and what the one that is ready said.

        Raises:
            TritonFailedError: a child ended instead.
        """
        while True:
            if (failure := self.failure) is not None:
                raise TritonFailedError(failure)
            addresses = [triton.live.grpc for triton in self._tritons if triton.live is not None]
            ready = next((triton.ready for triton in self._tritons if triton.ready is not None), None)
            if ready is not None and len(addresses) == len(self._tritons):
                self._decided = (
                    True  # before a last look, so that either this or the signal tells of a failure
                )
                if self.failure is None:
                    return addresses, ready
            time.sleep(_LOOK_EVERY_S)

    def leave(self, *_: object) -> NoReturn:
        """Stop all and end the process, as the handler of a signal amid imports.

        An exception could get lost: an extension module that is being imported may make another one of it.
        """
        with contextlib.suppress(KeyboardInterrupt), _interrupted():
            self.__exit__(KeyboardInterrupt)
        os._exit(_SIGNALLED + signal.SIGINT)

    def abandon(self) -> None:
        """Do not wait, on exit, until they have stopped."""
        self._abandoned = True

    def _end_serving(self) -> None:
        if self._decided:
            os.kill(os.getpid(), signal.SIGTERM)


Serve = Callable[[Sequence[str], Ready, Callable[[], None]], int]
"""Runs the gateway in front of addresses and models until a signal, at which it calls the last argument."""


def run_up(
    replicas: Sequence[Replica], serve: Serve, out: TextIO, *, meanwhile: Callable[[], object] = lambda: None
) -> int:
    """Run Tritons and, once one is ready, `serve` in front of all; return the process's exit status.

    SIGTERM, SIGINT and SIGHUP stop Tritons that are still starting; while `serve` runs, it handles them. One
    that comes while Tritons stop ends this process at once, and them a little later.

    Args:
        replicas: the Tritons (see `plan_replicas`).
        serve: returns the exit status, above 128 where a second signal cut the drain short.
        out: where progress is shown.
        meanwhile: called once, while the Tritons start. A signal amid it ends the process once they have
            stopped.
    """
    report = Report(out)
    tritons = EmbeddedTritons(replicas, report)
    status = 1
    try:
        with _interrupted(), tritons:
            tritons.start()
            with _handled(tritons.leave):
                meanwhile()
            status = serve(*tritons.wait_ready(), report.stopping)
            if status > _SIGNALLED:
                tritons.abandon()
    except TritonFailedError:
        pass  # said below
    except KeyboardInterrupt:
        report.stopping()
        status = _SIGNALLED + signal.SIGINT
    if tritons.failure is not None:
        report.say(f"Error: {tritons.failure}")
        return 1
    return status


def _interrupted() -> contextlib.AbstractContextManager[None]:
    """Have the signals that end this process raise KeyboardInterrupt."""
    return _handled(signal.default_int_handler)


@contextlib.contextmanager
def _handled(handler: Callable[[int, types.FrameType | None], object]) -> Iterator[None]:
    """Handle SIGTERM, SIGINT and SIGHUP so, unless they are ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number, usual in before.items():
        if usual is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
