"""The errors of the embedded server.

EmbeddedError
├── OptionsError     a model argument that cannot be served
├── PlatformError    something on the machine or in the environment is missing, or of the wrong version
├── ServerError      tritonserver cannot be started, died or hangs
└── LoadError        a model could not be loaded, or does not answer
    └── CallError    Triton answered a call with an error, or not in time

Each message is one line for the person at the terminal.
"""


class EmbeddedError(Exception):
    """The base class."""


class OptionsError(EmbeddedError):
    """A model argument that cannot be served, such as one that is not a directory, or a name used twice."""


class PlatformError(EmbeddedError):
    """The machine or the Python environment cannot run the wheel's tritonserver."""


class ServerError(EmbeddedError):
    """The server's port is in use, its process did not become live, or is no longer live.

    `crashed`: a signal ended it, and not its own decision.
    """

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed


class LoadError(EmbeddedError):
    """Triton refused to load a model, or the loaded model does not answer."""


class CallError(LoadError):
    """Triton answered a call with an error, or not in time.

    `timed_out`: there was no answer in time. `by_server`: the server itself reported the error; otherwise the
    cause may be the server's death.
    """

    def __init__(self, message: str, *, timed_out: bool = False, by_server: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.by_server = by_server
