"""Calls of libraries that are written in Rust.

When such a library fails an internal check, it panics. In Python a panic is an exception that derives from
`BaseException` only, so it would pass every `except Exception` and end the thread that serves all requests
instead of one request.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from triton_models.errors import LibraryPanicError

log = logging.getLogger(__name__)

_MEANT_TO_PASS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def panics_are_errors(library: str) -> Iterator[None]:
    """Turn a panic within the block into an error, and log it; other exceptions pass.

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
