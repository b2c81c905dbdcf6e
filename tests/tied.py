"""Ties processes to the one that started them: killed tests, whatever killed them, leave none behind.

As a program, `tied.py PARENT PROGRAM ARGUMENTS...`, it becomes PROGRAM, which is told to end (SIGTERM) when
the thread that started it does. That asks nothing of the tests' own process, which has threads, between fork
and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>; it holds across exec."""


def tied(*command: object) -> list[str]:
    """Return `command` as one that does not outlive the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, command)]


if __name__ == "__main__":
    parent, *program = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(parent):  # else it ended before this was said
        os.execvp(program[0], program)
