import logging

import pytest

from triton_models.errors import LibraryPanicError, panics_are_errors


class Panic(BaseException):
    """As what Python sees of a panic in Rust: no `Exception`."""


def test_a_panic_is_an_error_that_says_nothing_of_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LibraryPanicError, match=r"^rusty failed on this request$") as raised:
        _raise(Panic("secret"))
    assert isinstance(raised.value.__cause__, Panic)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit()])
def test_what_is_no_panic_passes(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error)) as raised:
        _raise(error)
    assert raised.value is error
    assert not caplog.records


def _raise(error: BaseException) -> None:
    with panics_are_errors("rusty"):
        raise error
