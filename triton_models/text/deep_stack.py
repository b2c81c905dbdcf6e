"""Runs foreign code whose recursion depth depends on a client's document."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

STACK_BYTES: Final = 2**28
"""llguidance takes up to 10 KB for each rule that refers to a next one, and a grammar of 2^18 characters has
room for thousands: they were measured to pass with half of this. A thread's usual
8 MiB overflow, which ends the process. Memory is only taken as far as the recursion goes."""

T = TypeVar("T")

_lock = threading.Lock()


def on_deep_stack(function: Callable[[], T]) -> T:
    """Return what `function` returns, or raise what it raises; it runs on a thread with a large stack."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            result.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _lock:
        # The size is the process's, for threads to come: another that starts now gets more than it needs.
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()
