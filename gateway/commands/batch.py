"""`tritongate batch`: asks every line of a file of OpenAI's batch format, and writes its batch output.

What was answered is in the output, a line each, as soon as it is known: so a run that was cut off goes on
where it was, and nothing is asked twice.
"""

import contextlib
import fcntl
import http.client
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from gateway.commands import INTERRUPTED
from gateway.commands.endpoint import DEFAULT_URL, ClientError, authorization, connected
from gateway.commands.progress import Progress, duration

_PASSING: Final = {429, 502, 503, 504}
"""Statuses worth another attempt."""
_LONGEST_PAUSE_S: Final = 30.0
_LOOK_S: Final = 0.1
_SHOWN: Final = 10
"""Of the input's mistakes."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request of the input."""

    custom_id: str
    path: str
    body: dict[str, Any]


def read_line(text: bytes) -> Line:
    """Read a line of the input.

    Raises:
        ValueError: it is no request that a batch can hold; the message says why.
    """
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a value of the file
    name, path, body = (document.get(key) for key in ("custom_id", "url", "body"))
    if not isinstance(name, str) or not name:
        raise ValueError("custom_id must be a text")
    if document.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    if not isinstance(path, str) or not re.fullmatch(r"/v1/[!-~]+", path):
        raise ValueError("url must be a path such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")  # noqa: TRY004 - as above
    if body.get("stream"):
        raise ValueError("body.stream: the answers of a batch are not streamed")
    return Line(name, path, body)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, each with its number."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def check_input(path: Path) -> set[str]:
    """Return the ids of all requests, each of which is one.

    Raises:
        ClientError: some are not; the message names them.
    """
    seen: dict[str, int] = {}
    wrong = []
    for number, text in lines_of(path):
        try:
            line = read_line(text)
            if (first := seen.setdefault(line.custom_id, number)) != number:
                raise ValueError(f"custom_id {line.custom_id!r} is that of line {first}")  # noqa: TRY301
        except ValueError as error:
            wrong.append(f"{path}:{number}: {error}")
    if wrong:
        more = [f"... and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ClientError("\n".join(["nothing was asked:", *wrong[:_SHOWN], *more]))
    return seen.keys() | set()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}") from None


def open_output(path: Path, *, keep_failed: bool) -> tuple[BinaryIO, set[str], int]:
    """Open the output to go on with it: return it, the ids that are done, and how many of these failed.

    The end of a line that a crash cut off is removed, and without `keep_failed` every line that failed.

    Raises:
        ClientError: it cannot be written, another run writes it, or it is no output of a batch.
    """
    with _writing(path):
        file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ClientError(f"another run is writing {path}") from None
    done: set[str] = set()
    failed = 0
    kept: list[bytes] = []
    file.seek(0)
    for number, text in enumerate(file, 1):
        if not text.endswith(b"\n"):
            break
        try:
            document = json.loads(text)
            name, fine = str(document["custom_id"]), succeeded(document)
        except (ValueError, LookupError, TypeError):
            file.close()
            raise ClientError(f"{path}:{number}: not a line of a batch's output; name another file") from None
        if fine or keep_failed:
            done.add(name)
            failed += not fine
            kept.append(text)
    complete = b"".join(kept)
    if len(complete) != os.fstat(file.fileno()).st_size:
        # A crash meanwhile must not lose what there is.
        safe = path.with_name(f"{path.name}.new")
        with _writing(safe):
            safe.write_bytes(complete)
        file.close()
        safe.replace(path)
        return open_output(path, keep_failed=True)
    return file, done, failed


def succeeded(document: dict[str, Any]) -> bool:
    """Whether a line of the output holds an answer."""
    response = document["response"]
    return response is not None and bool(response["status_code"] == http.client.OK)


class Batch:
    """Asks for lines on threads, and gives each result to the main thread.

    Args:
        url: of the endpoint.
        key: for it; None: it needs none.
        lines: what to ask for, in this order.
        at_once: how many threads ask.
        attempts: how often a request is sent that fails in a way that may pass.
    """

    def __init__(
        self, url: str, key: str | None, lines: Iterator[Line], *, at_once: int, attempts: int
    ) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json", **dict(authorization(key))}
        self._lines = lines
        self._lock = threading.Lock()
        """Held by who takes a line."""
        self._attempts = attempts
        self._stopping = threading.Event()
        self._results: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        """None: a thread has ended."""
        self.trouble = ""
        """Why the last attempt failed, if it did so in a way that may pass."""
        self._running = at_once
        for _ in range(at_once):
            threading.Thread(target=self._work, daemon=True).start()

    def stop(self) -> None:
        """Ask nothing more; what was asked goes on."""
        self._stopping.set()

    def result(self) -> dict[str, Any] | None:
        """Return a line of the output, or None after a short while without one."""
        with contextlib.suppress(queue.Empty):
            result = self._results.get(timeout=_LOOK_S)
            if result is not None:
                return result
            self._running -= 1
        return None

    @property
    def running(self) -> bool:
        """Whether there may be more results."""
        return self._running > 0

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is for the main thread
        try:
            with connected(self._url) as (connection, prefix):
                while (line := self._next()) is not None:
                    if (result := self._ask(connection, prefix, line)) is not None:
                        self._results.put(result)
        finally:
            self._results.put(None)

    def _next(self) -> Line | None:
        with self._lock:
            return None if self._stopping.is_set() else next(self._lines, None)

    def _ask(self, connection: http.client.HTTPConnection, prefix: str, line: Line) -> dict[str, Any] | None:
        """Return the line's result; None: it was stopped while it waited for another attempt."""
        body = json.dumps(line.body).encode()
        for attempt in range(1, self._attempts + 1):
            requested = None
            try:
                connection.request("POST", prefix + line.path, body, self._headers)
                response = connection.getresponse()
                answer = response.read()
                requested = response.headers.get("retry-after")
                result = _result(line, response, answer)
                if response.status not in _PASSING:
                    self.trouble = ""
                    return result
            except (OSError, ValueError, http.client.HTTPException) as error:
                connection.close()  # the next request opens it again
                result = _failure(line, f"cannot reach {self._url}: {error or type(error).__name__}")
            self.trouble = _why(result)
            pause_s = min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
            if requested is not None and requested.isdecimal():
                pause_s = max(pause_s, float(requested))
            if attempt < self._attempts and self._stopping.wait(pause_s):
                return None
        return result


def _result(line: Line, response: http.client.HTTPResponse, answer: bytes) -> dict[str, Any]:
    try:
        document = json.loads(answer)
    except ValueError:
        return _failure(line, f"the answer with status {response.status} is not JSON")
    request = response.headers.get("x-request-id", "")
    return _output(line, {"status_code": response.status, "request_id": request, "body": document}, None)


def _failure(line: Line, message: str) -> dict[str, Any]:
    return _output(line, None, {"code": "request_failed", "message": message})


def _output(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}


def _why(failed: dict[str, Any]) -> str:
    """Return in one line why a line's attempt failed."""
    if (response := failed["response"]) is None:
        return str(failed["error"]["message"])
    error = response["body"].get("error") if isinstance(response["body"], dict) else None
    said = error.get("message") if isinstance(error, dict) else None
    return f"{response['status_code']}: {said}" if said else f"status {response['status_code']}"


@dataclass(slots=True)
class _Counts:
    """How far a run is."""

    total: int
    done: int
    failed: int
    new: int = 0
    began: float = 0.0

    def add(self, document: dict[str, Any]) -> None:
        self.done += 1
        self.new += 1
        self.failed += not succeeded(document)

    def __str__(self) -> str:
        rate = self.new / max(time.monotonic() - self.began, 1e-6)
        left = (
            f", {duration((self.total - self.done) / rate)} left"
            if rate > 0 and self.done < self.total
            else ""
        )
        return f"{self.done:,} of {self.total:,} done, {self.failed:,} failed, {rate:.1f} a second{left}"


def _line(counts: _Counts, batch: Batch) -> str:
    return "; ".join(filter(None, [str(counts), batch.trouble]))


def run(batch: Batch, out: BinaryIO, counts: _Counts, progress: Progress) -> bool:
    """Write results until there are no more; return whether Ctrl-C cut it short.

    A first Ctrl-C lets finish what was asked, a second one drops it. Of what fails, the first is shown: with
    a wrong key or model, all are alike.
    """
    stopped = told = False
    with _held_interrupts():
        while batch.running:
            if (document := batch.result()) is not None:
                written = json.dumps(document, ensure_ascii=False)
                # Half of a surrogate pair has no UTF-8; in JSON, Python's escape of it is the escape.
                out.write(written.encode(errors="backslashreplace") + b"\n")
                out.flush()
                counts.add(document)
                if not told and not succeeded(document):
                    told = True
                    progress.say(f"{document['custom_id']} failed: {_why(document)}")
            progress.show(_line(counts, batch))
            if signal.SIGINT in signal.sigpending():
                signal.sigwait({signal.SIGINT})
                if stopped:
                    break
                stopped = True
                batch.stop()
                progress.say("stopping: waiting for what was asked already; Ctrl-C again drops it")
    return stopped


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Have Ctrl-C wait until it is looked for: as an exception it could lose an answer before its line."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@click.command(short_help="Answer a file in OpenAI's batch format.")
@click.argument("source", metavar="IN.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", metavar="OUT.JSONL", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", default=DEFAULT_URL, show_default=True, help="of the gateway, or any OpenAI endpoint")
@click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key of the endpoint")
@click.option("--at-once", type=click.IntRange(1, 1024), default=16, show_default=True, help="requests")
@click.option(
    "--attempts",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="for a request that finds the endpoint full, away or not ready",
)
@click.option("--retry-failed", is_flag=True, help="ask again for what failed in earlier runs")
def batch(
    *, source: Path, target: Path, url: str, key: str | None, at_once: int, attempts: int, retry_failed: bool
) -> None:
    """Have each line of a file in OpenAI's batch format answered, several at once; status 1 if one is not.

    Run it again to go on after Ctrl-C or a crash: what OUT.JSONL holds is not asked for again.
    """
    ids = check_input(source)
    with connected(url):
        pass  # only whether it is a URL
    out, done, failed = open_output(target, keep_failed=not retry_failed)
    with _writing(target), out:
        if stray := done - ids:
            raise ClientError(f"{target} holds answers to another input, such as {min(stray)!r}")
        requests = (read_line(text) for _, text in lines_of(source))
        lines = (line for line in requests if line.custom_id not in done)
        counts = _Counts(total=len(ids), done=len(done), failed=failed, began=time.monotonic())
        with Progress() as progress:
            if failed:
                progress.say(f"{failed:,} failed in earlier runs; --retry-failed asks for them again")
            asking = Batch(url, key, lines, at_once=min(at_once, max(1, len(ids - done))), attempts=attempts)
            stopped = run(asking, out, counts, progress)
            progress.show(_line(counts, asking))
    sys.exit(INTERRUPTED if stopped else int(counts.failed > 0 or counts.done < counts.total))
