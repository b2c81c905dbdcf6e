"""What a model does because it runs in a process of its own, Triton's stub: log, and end with the server.

The stub itself does not notice when tritonserver is killed, and would keep its memory for ever. So the kernel
is told to kill it then. That works without the interpreter lock, which a call into the shared memory of a
dead server holds for ever, and needs no timer, which could not tell a process that is stuck from one that was
stopped for a while.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

WATCH_INTERVAL_S = 0.5

UNREQUESTED_LIMIT_S = 15.0
"""How long a process that is initialized waits for a warm-up that is to follow at once. Triton (2.51) takes a
process for dead that has not run for a second while it was starting, and then waits for its end. Nothing but
the missing first request tells such a process from one that is wanted."""

_PR_SET_PDEATHSIG = 1

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

    def initialized(self) -> None:
        """Note the end of `initialize`: from now on it is Triton's turn."""
        self._awaits_request = self._warmed_up

    def requested(self) -> None:
        """Note a request. With a warm-up, the first one comes before the entry is ready."""
        self._awaits_request = self._warmed_up = False

    def _watch(self) -> None:
        # Turns are counted, not seconds: a process that was stopped for a minute has not waited.
        turns, tied = 0, False
        while os.getppid() == self._parent:
            if turns * WATCH_INTERVAL_S >= UNREQUESTED_LIMIT_S:
                log.critical("Triton has given this process up, and waits for its end")
                break
            turns = turns + 1 if self._awaits_request else 0
            tied = tied or tie_to(self._parent)
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)  # without clean-up, which may need the server


def tie_to(parent: int) -> bool:
    """Have the kernel kill this process when `parent` ends, as long as the calling thread lives.

    A parent-death signal comes when the *thread* ends whose child this process is. Triton starts stubs on
    threads that end with the load; the kernel then passes the children on to the process's first thread.

    Returns:
        Whether that thread is the parent's first, which ends with the process; else nothing is done.
    """
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
        if str(os.getpid()) in children:
            return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    return False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while modules are imported: torch's make little, and it is a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_what_is_loaded() -> None:
    """Leave what there is now out of collections: one over all of torch stops every stream for 100 ms."""
    gc.collect()
    gc.freeze()


def is_warmed_up(model_config: str) -> bool:
    """Return whether an entry of this configuration (JSON) is warmed up as soon as it is initialized.

    With several instances, the warm-up may wait for the others.
    """
    declared = json.loads(model_config)
    groups = declared.get("instance_group", [])
    instances = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    return bool(declared.get("model_warmup")) and instances == 1
