"""The errors of the embedded server.

EmbeddedError
├── OptionsError     a model argument that cannot be served
├── PlatformError    something on the machine or in the environment is missing, or of the wrong version
├── PortInUseError   another process listens there already
├── ServerError      tritonserver did not start, died or hangs
├── LoadError        a model could not be loaded or unloaded, or does not answer
└── StoppedError     not a fault: the stop request came while waiting

Each message is one line for the person at the terminal.
"""


class EmbeddedError(Exception):
    """The base class."""


class OptionsError(EmbeddedError):
    """A model argument that cannot be served, such as one that is not a directory, or a name used twice."""


class PlatformError(EmbeddedError):
    """The machine or the Python environment cannot run the wheel's tritonserver."""


class PortInUseError(EmbeddedError):
    """A port that was requested by number is in use, or cannot be bound."""


class ServerError(EmbeddedError):
    """The server process did not become live, or is no longer live."""


class LoadError(EmbeddedError):
    """Triton refused to load an entry, or the loaded entry does not answer.

    `by_server`: whether the server itself reported the error; otherwise the cause may be the server's death.
    """

    def __init__(self, message: str, *, by_server: bool = False) -> None:
        super().__init__(message)
        self.by_server = by_server


class StoppedError(EmbeddedError):
    """The supervisor is stopping, so the result of the interrupted wait no longer matters."""
