"""What a model does because it runs in a process of its own, Triton's stub: log, and end with the server.

The stub itself does not notice when tritonserver is killed, and would keep its memory for ever. So a thread
here watches the parent's process id. A parent-death signal would not do: it is tied to the server's thread
that started the stub, which may end before the server.

The thread cannot watch while a call into the shared memory of a dead server holds the interpreter lock, for
ever. Such a call is avoided (`Sender` and `EngineMetrics` look at the parent first), not excluded: the server
may be dying just then. What is left is cleaned up from outside: under `tritongate up` by the warden, in a
container with its process-id namespace. No timer of our own does it, because none can tell a process that is
stuck from one that was stopped for a while.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping

WATCH_INTERVAL_S = 0.5

UNREQUESTED_LIMIT_S = 60.0
"""How long a process that is initialized waits for a warm-up that is to follow at once. Triton (2.51) takes a
process for dead that has not run for a second while it was starting, and then waits for its end. Nothing but
the missing first request tells such a process from one that is wanted."""

log = logging.getLogger(__name__)


class Stub:
    """Logs to stderr, which is the server's, and ends the process when the server is gone or has given it up.

    Args:
        args: what Triton passed to `initialize`.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        self._parent = os.getppid()
        self._warmed_up = is_warmed_up(args["model_config"])
        self._awaits_request = False
        threading.Thread(target=self._watch, name="parent-watchdog", daemon=True).start()

    def orphaned(self) -> bool:
        """Return whether the server is gone."""
        return os.getppid() != self._parent

    def initialized(self) -> None:
        """Note the end of `initialize`: from now on it is Triton's turn."""
        self._awaits_request = self._warmed_up

    def requested(self) -> None:
        """Note a request. With a warm-up, the first one comes before the entry is ready."""
        self._awaits_request = self._warmed_up = False

    def _watch(self) -> None:
        # Turns are counted, not seconds: a process that was stopped for a minute has not waited.
        turns = 0
        while not self.orphaned() and turns * WATCH_INTERVAL_S < UNREQUESTED_LIMIT_S:
            turns = turns + 1 if self._awaits_request else 0
            time.sleep(WATCH_INTERVAL_S)
        if not self.orphaned():
            log.critical("Triton has given this process up, and waits for its end")
        os._exit(1)  # without clean-up, which may need the server


def is_warmed_up(model_config: str) -> bool:
    """Return whether an entry of this configuration (JSON) is warmed up as soon as it is initialized.

    With several instances, the warm-up may wait for the others.
    """
    declared = json.loads(model_config)
    groups = declared.get("instance_group", [])
    instances = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    return bool(declared.get("model_warmup")) and instances == 1
