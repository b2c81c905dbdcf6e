"""The errors of the embedded server.

EmbeddedError
├── SetupError     a model argument that cannot be served, or a machine or environment that cannot serve any
├── ServerError    tritonserver cannot be started, died or hangs
└── ModelError     a model could not be loaded, or does not answer

Each message is one line for the person at the terminal.
"""


class EmbeddedError(Exception):
    """The base class."""


class SetupError(EmbeddedError):
    """What was asked for cannot be served here: its user must change an argument, or install something."""


class ServerError(EmbeddedError):
    """The server's port is in use, its process did not become live, or is no longer live.

    `transient`: another start may help, as after a crash.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class ModelError(EmbeddedError):
    """Triton answered a call about a model with an error, or not in time, or is gone."""
