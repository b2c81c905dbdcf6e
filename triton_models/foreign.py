"""Calls of libraries that are written in Rust.

Where such a library fails an assumption of its own, it panics. The exception that Python sees of a panic
derives from `BaseException` alone, so it would pass every `except Exception` on its way, and end the thread
that serves all requests instead of one request.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from triton_models.errors import LibraryPanicError

log = logging.getLogger(__name__)

_MEANT_TO_PASS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def panics_are_errors(library: str) -> Iterator[None]:
    """Have a panic within the block raised as an error, and logged; all other exceptions pass.

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
