"""Guards calls into libraries that are written in Rust.

When such a library fails an internal check, it panics. In Python a panic is an exception that derives
directly from `BaseException`. So `except Exception` does not catch it, and instead of failing one request it
would end the thread that serves all of them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from triton_models.errors import LibraryPanicError

log = logging.getLogger(__name__)

_MEANT_TO_PASS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def panics_are_errors(library: str) -> Iterator[None]:
    """Log a panic within the block and turn it into an error; other exceptions are passed on.

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
