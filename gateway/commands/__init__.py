"""The subcommands of `tritongate`, and where its process begins."""

import os
import signal
import types
from typing import Final

INTERRUPTED: Final = 128 + signal.SIGINT
"""The status of a command that Ctrl-C ended."""


def run() -> None:
    """Be the program: from here on, Ctrl-C ends it in a word, even while modules are imported.

    So does a SIGTERM, which the kernel would drop for want of a handler where this is a container's first
    process: whoever stops the container would wait until it is killed.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background job
            signal.signal(number, stop_at_once)
    # Its library writes lines of its own among those of the log: of each failed TLS handshake, for example.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from gateway.cli import main  # noqa: PLC0415 - takes half a second

    main()


def stop_at_once(number: int, _frame: types.FrameType | None) -> None:
    """End the process, which has nothing yet that would have to be cleaned up."""
    os.write(2, b"stopping\n")
    os._exit(128 + number)
