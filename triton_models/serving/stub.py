"""What every model does as a process of its own, Triton's stub.

The stub does not notice that tritonserver was killed and would keep its memory for ever. A parent-death
signal would be tied to the server's thread that started the stub, which may end earlier; watching the
parent's id is not. And where a call into the shared memory of a server that is gone holds the interpreter
lock for ever, as `is_cancelled()` can, no thread of Python's ever watches again: a timer of the kernel's ends
the process then.
"""

import logging
import os
import signal
import sys
import threading
import time

WATCH_INTERVAL_S = 0.5

STUCK_S = 60
"""A process whose interpreter ran nothing for so long serves nobody, whoever holds it."""


def start_stub() -> None:
    """Log to stderr, which is the server's, and exit at once, without clean-up, when the server is gone."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parent = os.getppid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, and needs no interpreter

    def watch() -> None:
        while os.getppid() == parent:
            signal.alarm(STUCK_S)
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
