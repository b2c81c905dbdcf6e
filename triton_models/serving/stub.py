"""What every model does because it runs in a process of its own, Triton's stub: log, and end with the server.

The stub itself does not notice when tritonserver is killed, and would keep its memory for ever. So a thread
here watches the parent's process id. A parent-death signal would not do: it is tied to the server's thread
that started the stub, which may end before the server. The watching thread can be stopped, too: a call into
the shared memory of a dead server, such as `is_cancelled()`, can hold the interpreter lock for ever. Then a
kernel timer, which the thread keeps resetting as long as it runs, ends the process.
"""

import logging
import os
import signal
import sys
import threading
import time

WATCH_INTERVAL_S = 0.5

STUCK_S = 60
"""A process that ran no Python code for this long serves nobody, whatever holds the interpreter lock."""


INITIALIZED = "is initialized"
ASKED = "has its first request"

log = logging.getLogger(__name__)


class Stub:
    """Says in the log how far the process of `entry` is, for whoever looks after it.

    Triton (2.51) may give a process up while that is starting, and then waits for its end; nothing but this
    shows the difference to one whose start takes long.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._asked = False

    def initialized(self) -> None:
        """Called at the end of `initialize`: from now on it is Triton's turn."""
        log.info("%s %s", self._entry, INITIALIZED)

    def asked(self) -> None:
        """Called by `execute` of an entry with a warm-up, which comes before the entry is ready."""
        if not self._asked:
            self._asked = True
            log.info("%s %s", self._entry, ASKED)


def start_stub(entry: str) -> Stub:
    """Log to stderr, which is the server's, and exit at once, without clean-up, when the server is gone."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parent = os.getppid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process without needing the interpreter

    def watch() -> None:
        while os.getppid() == parent:
            signal.alarm(STUCK_S)
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
    return Stub(entry)
