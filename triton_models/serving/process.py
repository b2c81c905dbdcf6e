"""Tells whether another process of this host still runs, even if its number has been given to a new one.

The formats are those of proc_pid_stat(5), https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
"""

import os
from pathlib import Path
from typing import Final

_ENDED: Final = frozenset("ZXx")
"""States of a process that has ended, whether or not its parent has taken note."""


def process_name(pid: int | None = None) -> str:
    """Return the name of a process, by default of this one: its number and its start, which no other has.

    Raises:
        ProcessLookupError: there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    if (found := _state_and_start(pid)) is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return f"{pid}.{found[1]}"


def is_running(name: str) -> bool:
    """Return whether the process with this name still runs; a stopped one does, and one that is hidden."""
    pid, _, start = name.partition(".")
    try:
        found = _state_and_start(int(pid))
    except OSError:
        return True
    return found is not None and found[1] == start and found[0] not in _ENDED


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """Return a process's state, and its start in clock ticks since boot; None if there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program in brackets, and may hold anything, brackets too.
    fields = line.rpartition(")")[2].split()
    return fields[0], fields[19]
