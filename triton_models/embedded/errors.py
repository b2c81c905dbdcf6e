"""The errors of the embedded server.

EmbeddedError
├── OptionsError     a model argument that cannot be served
├── PlatformError    something on the machine or in the environment is missing, or of the wrong version
├── PortInUseError   another process listens there already
├── ServerError      tritonserver did not start, died or hangs
├── LoadError        a model could not be loaded or unloaded, or does not answer
└── StoppedError     no fault: the stop came while waiting

The message of each is one line for the person at the terminal.
"""


class EmbeddedError(Exception):
    """The base."""


class OptionsError(EmbeddedError):
    """A model argument names no directory, or two have the same name."""


class PlatformError(EmbeddedError):
    """The machine or the Python environment cannot run the wheel's tritonserver."""


class PortInUseError(EmbeddedError):
    """A port that was asked for by number has a listener already."""


class ServerError(EmbeddedError):
    """The server process did not become live, or no longer is."""


class LoadError(EmbeddedError):
    """Triton refused to load an entry, or the loaded entry does not answer.

    `by_server`: the server itself said so; otherwise its death may be behind it.
    """

    def __init__(self, message: str, *, by_server: bool = False) -> None:
        super().__init__(message)
        self.by_server = by_server


class StoppedError(EmbeddedError):
    """The supervisor is stopping: whatever was waited for no longer matters."""
