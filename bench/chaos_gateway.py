"""`tritongate`, with one thing more: SIGUSR1 has it write how many asyncio tasks it has.

The number goes into the file that CHAOS_TASKS names.
"""

import asyncio
import os
import signal
from pathlib import Path

from gateway.cli import main

_TASKS = "CHAOS_TASKS"


def _count_tasks(*_: object) -> None:
    path = Path(os.environ[_TASKS])
    unfinished = path.with_suffix(".part")
    unfinished.write_text(str(len(asyncio.all_tasks())), encoding="ascii")
    unfinished.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _count_tasks)
    main()
