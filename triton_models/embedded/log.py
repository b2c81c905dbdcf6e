"""Keeps the output of the server and its stubs in a file of bounded size, and finds error messages in it."""

import collections
import logging
import logging.handlers
import os
import re
import threading
from pathlib import Path

from triton_models.serving import stub

_MAX_BYTES = 4 * 1024 * 1024
_KEPT_LINES = 40
_ERROR = re.compile(rb'E\d{4} [\d:.]+ \d+ [^\]]+\] "?(.*?)"?$')
_INFORMATION = re.compile(rb"[IW]\d{4} [\d:.]+ \d+ ")
_UNCAUGHT = re.compile(r"terminate called after throwing an instance of '(.+)'")
"""What the C++ runtime says before it aborts a process."""
_PROGRESS = re.compile(rb"(\d{1,3})%\|")
"""A tqdm bar, such as the checkpoint reader draws."""

_STUB = re.compile(rf" {re.escape(stub.__name__)}: (\S+): process (\d+) ({stub.INITIALIZED}|{stub.ASKED})$")
"""What the process of an entry says of itself."""

DEAD_STUB = "is not healthy"
"""Part of Triton's answer for an entry whose stub died; it goes on reporting such an entry as ready."""

FULL_QUEUE = "Exceeds maximum queue size"
"""Part of Triton's answer when an entry's queue is full."""

_LOAD_FAILURE = re.compile(r"is at UNAVAILABLE state: (?:Internal: )?(.*)", re.DOTALL)
_TRACEBACK = re.compile(r"\s+At:\n.*", re.DOTALL)


class ServerLog:
    """Copies the server's output to a file of bounded size, in its own thread.

    Of progress bars, which are lines that end in a carriage return, only the percentage is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=_MAX_BYTES, backupCount=1, encoding="utf-8"
        )
        self._errors: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._other: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._uncaught: str | None = None
        self._unasked: dict[str, set[int]] = {}
        """By entry, its processes that are initialized and have not been asked anything."""
        self._progress: float | None = None
        self._thread: threading.Thread | None = None

    def follow(self, descriptor: int) -> None:
        """Copy from the pipe `descriptor` until it ends, then close it; returns at once.

        The messages of an earlier server are forgotten, but stay in the file.
        """
        self._errors.clear()
        self._other.clear()
        self._uncaught = None
        self._unasked.clear()
        self._thread = threading.Thread(target=self._copy, args=(descriptor,), name="triton-log", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float = 1.0) -> None:
        """Wait, for at most `timeout_s`, until all output of a server that ended has been read."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the file."""
        self.drain()
        self._handler.close()

    def complaint(self) -> str:
        """Return in one line what went wrong: the server's last error, else its last line of unknown form."""
        lines = self._errors or self._other
        return lines[-1] if lines else "it said nothing"

    def errors(self) -> list[str]:
        """Return the latest error messages, oldest first."""
        return list(self._errors)

    @property
    def uncaught(self) -> str | None:
        """The type of the C++ exception that ended the server, or one of its stubs; None if none did."""
        return self._uncaught

    def reset_progress(self) -> None:
        """Forget the last progress bar."""
        self._progress = None

    @property
    def progress(self) -> float | None:
        """The value of the most recent progress bar, 0 to 1; None if there was none."""
        return self._progress

    def forget(self, entry: str) -> None:
        """Forget what processes of `entry` have said of themselves: others are about to be started."""
        self._unasked.pop(entry, None)

    def unasked(self, entry: str, pid: int) -> bool:
        """Whether this process of `entry` has said that it is initialized, and not that it has a request."""
        return pid in self._unasked.get(entry, ())

    def _copy(self, descriptor: int) -> None:
        pending = b""
        while chunk := os.read(descriptor, 65536):
            *lines, pending = re.split(rb"(?<=[\r\n])", pending + chunk)
            for line in lines:
                self._take(line)
        os.close(descriptor)
        self._take(pending)

    def _take(self, line: bytes) -> None:
        text = line.strip()
        bar = _PROGRESS.search(text)
        if bar is not None:
            self._progress = min(int(bar[1]), 100) / 100
        if not text or (bar is not None and line.endswith(b"\r")):
            return
        written = text.decode(errors="replace")
        if (said := _STUB.search(written)) is not None:
            unasked = self._unasked.setdefault(said[1], set())
            (unasked.add if said[3] == stub.INITIALIZED else unasked.discard)(int(said[2]))
        self._handler.emit(logging.LogRecord("triton", logging.INFO, "", 0, written, None, None))
        if (uncaught := _UNCAUGHT.match(written)) is not None:
            self._uncaught = uncaught[1]
        error = _ERROR.match(text)
        if error is not None:
            self._errors.append(error[1].decode(errors="replace"))
        elif not _INFORMATION.match(text) and bar is None:
            self._other.append(written)


def load_failure(message: str, log: ServerLog) -> str:
    """Return why Triton could not load an entry, in one line without a traceback."""
    found = _LOAD_FAILURE.search(message)
    if found is not None:
        message = found[1]
    elif errors := log.errors():
        message = f"{message}: {errors[-1]}"
    if DEAD_STUB in message:
        return "its process died while loading; is there enough memory?"
    return " ".join(_TRACEBACK.sub("", message).split()).rstrip(";")
