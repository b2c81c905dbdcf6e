"""`tritongate up` as `bench.chaos` needs it: its way to the Tritons can be cut, and its tasks be counted.

SIGUSR1 has one of its processes write how many asyncio tasks it has into the folder CHAOS_TASKS, as a file of
the name of its process id. The addresses of the Tritons are written to the file CHAOS_TRITONS, one a line,
and the gateway gets those of CHAOS_RELAYS instead.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from gateway.cli import main
from gateway.process import workers
from gateway.up import EmbeddedTritons
from wire.events import Ready

_wait_ready = EmbeddedTritons.wait_ready


def _count_tasks(*_: object) -> None:
    path = Path(os.environ["CHAOS_TASKS"]) / str(os.getpid())
    unfinished = path.with_suffix(".part")
    unfinished.write_text(str(len(asyncio.all_tasks())), encoding="ascii")
    unfinished.replace(path)


def _wait_behind_relays(tritons: EmbeddedTritons) -> tuple[list[str], Ready]:
    addresses, ready = _wait_ready(tritons)
    Path(os.environ["CHAOS_TRITONS"]).write_text("\n".join(addresses), encoding="ascii")
    return os.environ["CHAOS_RELAYS"].split(), ready


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _count_tasks)
    if len(sys.argv) == 1:
        sys.exit(workers.main())
    workers.PROGRAM = ("-m", "bench.chaos_gateway")
    EmbeddedTritons.wait_ready = _wait_behind_relays  # type: ignore[method-assign, assignment]
    main()
