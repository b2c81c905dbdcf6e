"""What every model does as a process of its own, Triton's stub.

The stub does not notice that tritonserver was killed and would keep its memory for ever. A parent-death
signal would be tied to the server's thread that started the stub, which may end earlier; watching the
parent's id is not.
"""

import logging
import os
import sys
import threading
import time

WATCH_INTERVAL_S = 0.5


def start_stub() -> None:
    """Log to stderr, which is the server's, and exit at once, without clean-up, when the server is gone."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
