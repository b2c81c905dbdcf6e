"""The subcommands of `tritongate`, and where its process begins."""

import os
import signal
import types
from typing import Final

INTERRUPTED: Final = 128 + signal.SIGINT
"""The status of a command that Ctrl-C ended."""


def run() -> None:
    """Be the program: from here on, Ctrl-C ends it in a word, even while modules are imported."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background job
        signal.signal(signal.SIGINT, stop_at_once)
    # Its library writes lines of its own among those of the log: of each failed TLS handshake, for example.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from gateway.cli import main  # noqa: PLC0415 - takes half a second

    main()


def stop_at_once(number: int, _frame: types.FrameType | None) -> None:
    """End the process, which has nothing yet that would have to be cleaned up."""
    os.write(2, b"stopping\n")
    os._exit(128 + number)
