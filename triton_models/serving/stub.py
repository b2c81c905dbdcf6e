"""What every model does because it runs in a process of its own, Triton's stub: log, and end with the server.

The stub itself does not notice when tritonserver is killed, and would keep its memory for ever. So a thread
here watches the parent's process id. A parent-death signal would not do: it is tied to the server's thread
that started the stub, which may end before the server. The watching thread can be stopped, too: a call into
the shared memory of a dead server, such as `is_cancelled()`, can hold the interpreter lock for ever. Then a
kernel timer, which the thread keeps resetting as long as it runs, ends the process.
"""

import json
import logging
import os
import signal
import sys
import threading
import time

WATCH_INTERVAL_S = 0.5

STUCK_S = 60
"""A process that ran no Python code for this long serves nobody, whatever holds the interpreter lock."""

UNASKED_S = 60.0
"""How long a process that is initialized waits for a warm-up that is to follow at once."""

INITIALIZED = "is initialized"
ASKED = "has its first request"

log = logging.getLogger(__name__)


class Stub:
    """Says in the log how far the process of an entry is, and knows when Triton has given it up.

    Triton (2.51) takes a process for dead that has not run for a second while it was starting, and then waits
    for its end. Nothing but the missing first request tells such a process from one that is wanted.

    Args:
        entry: the entry's name.
        warmed_up: whether Triton's first request follows the start at once (`is_warmed_up`).
    """

    def __init__(self, entry: str, *, warmed_up: bool) -> None:
        self._entry = entry
        self._warmed_up = warmed_up
        self._asked = False
        self._unasked_since: float | None = None

    def initialized(self) -> None:
        """Called at the end of `initialize`: from now on it is Triton's turn."""
        self._say(INITIALIZED)
        if self._warmed_up:
            self._unasked_since = time.monotonic()

    def asked(self) -> None:
        """Called by `execute`. With a warm-up, that is before the entry is ready."""
        if not self._asked:
            self._asked = True
            self._unasked_since = None
            self._say(ASKED)

    def given_up(self) -> bool:
        """Return True if the first request is `UNASKED_S` late."""
        since = self._unasked_since
        return since is not None and time.monotonic() - since > UNASKED_S

    def _say(self, what: str) -> None:
        log.info("%s: process %d %s", self._entry, os.getpid(), what)


def is_warmed_up(model_config: str) -> bool:
    """Return whether an entry of this configuration (JSON) is warmed up as soon as it is initialized.

    With several instances, the warm-up may wait for the others.
    """
    declared = json.loads(model_config)
    groups = declared.get("instance_group", [])
    instances = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    return bool(declared.get("model_warmup")) and instances == 1


def start_stub(args: dict[str, str]) -> Stub:
    """Log to stderr, which is the server's, and end without clean-up when the server is gone or gave this up.

    Args:
        args: what Triton passed to `initialize`.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parent = os.getppid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process without needing the interpreter
    stub = Stub(args["model_name"], warmed_up=is_warmed_up(args["model_config"]))

    def watch() -> None:
        while os.getppid() == parent and not stub.given_up():
            signal.alarm(STUCK_S)
            time.sleep(WATCH_INTERVAL_S)
        if stub.given_up():
            log.critical("Triton has given this process up, and waits for its end")
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
    return stub
