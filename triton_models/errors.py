"""Every error of the model side.

ModelError
├── CheckpointError                  names the file and, where it applies, the tensor
│   └── UnsupportedArchitectureError
├── EntryError                       an unknown or unusable parameter in a repository entry's config.pbtxt
├── EnvironmentPackError             a Python environment that cannot be packed for Triton
├── InvalidGrammarError              a grammar that is broken, too large, or cannot be enforced
├── TextError                        a text or conversation that the tokenizer or chat format cannot express
├── SettingsError                    the engine cannot be built with these settings
├── TokenMaskError                   a request's token mask failed; only that request fails
├── LibraryPanicError                a library in Rust panicked
└── raised when a request is added, before any work is done for it:
    InvalidRequestError, PromptTooLongError, QueueFullError, ChannelLostError, EngineStoppedError

Messages are meant for whoever sent the request or started the server: no traceback, no secret.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_MEANT_TO_PASS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)


class ModelError(Exception):
    """The root of this package's errors."""

    def __str__(self) -> str:
        """Return the message as text that can be sent, also if bytes of a file's name stand in it."""
        return super().__str__().encode(errors="surrogateescape").decode(errors="replace")


class CheckpointError(ModelError):
    """A checkpoint directory that is incomplete, broken or of an unknown kind."""


class UnsupportedArchitectureError(CheckpointError):
    """A valid checkpoint of a model that our forward pass does not implement."""


class EntryError(ModelError):
    """A repository entry with an unknown or unusable parameter."""


class EnvironmentPackError(ModelError):
    """A Python environment that cannot be built or packed."""


class InvalidGrammarError(ModelError):
    """A grammar that cannot be enforced; the message says which part of it."""


class TextError(ModelError):
    """A text that is not Unicode, or a conversation that the chat format cannot express."""


class SettingsError(ModelError):
    """Engine settings that are out of range, or incompatible with each other, the model or the machine."""


class TokenMaskError(ModelError):
    """A token mask failed, or leaves no token to choose."""


class LibraryPanicError(ModelError):
    """A fault of the library, not of the request. The details are logged and not sent to the client."""


class InvalidRequestError(ModelError):
    """A value out of range, or a combination that cannot be honoured."""


class PromptTooLongError(ModelError):
    """The prompt alone, or together with the requested answer length, exceeds the context."""


class QueueFullError(ModelError):
    """The engine holds as many open requests as it can."""


class ChannelLostError(ModelError):
    """The delta channel that the request names is not open, or no longer open."""


class EngineStoppedError(ModelError):
    """The engine was stopped, or gave up after repeated failures."""


@contextmanager
def panics_are_errors(library: str) -> Iterator[None]:
    """Log a panic of a library in Rust within the block and turn it into an error; pass on other exceptions.

    In Python a panic derives directly from `BaseException`. So `except Exception` does not catch it, and
    instead of failing one request it would end the thread that serves all of them.

    Raises:
        LibraryPanicError: `library` panicked.
    """
    try:
        yield
    except _MEANT_TO_PASS:
        raise
    except BaseException as error:
        log.exception("%s panicked", library)
        raise LibraryPanicError(f"{library} failed on this request") from error


@contextmanager
def faults_name_the_file(path: Path, what: str) -> Iterator[None]:
    """Turn any exception of a library within the block into an error that names the file.

    A library may raise anything on damaged bytes, or on one of a hundred classes.

    Raises:
        CheckpointError: `path`, and `what` its fault means.
    """
    try:
        yield
    except Exception as error:
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: {what}: {detail[0]}") from error
