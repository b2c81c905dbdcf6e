"""The errors of the embedded server.

EmbeddedError
├── OptionsError     a model argument that cannot be served
├── PlatformError    something on the machine or in the environment is missing, or of the wrong version
├── PortInUseError   another process listens there already
├── ServerError      tritonserver did not start, died or hangs
├── LoadError        a model could not be loaded or unloaded, or does not answer
│   └── GivenUpError Triton took its process for dead while that was starting
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


class GivenUpError(LoadError):
    """Triton took an entry's process for dead while that was starting. The next attempt may well succeed.

    That is what Triton (2.51) concludes when a process has not run for a second, as on a machine whose
    processors or memory others use. It then waits for the end of the process, and does not bring it about.
    """

    def __init__(self) -> None:
        super().__init__("Triton gave its process up while that was starting", by_server=True)


class StoppedError(EmbeddedError):
    """The supervisor is stopping, so the result of the interrupted wait no longer matters."""
