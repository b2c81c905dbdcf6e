"""Runs foreign code whose recursion depth depends on a client's document."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

STACK_BYTES: Final = 2**28
"""llguidance needs up to 10 KB of stack for each rule in a chain of references, and a grammar of 2^18
characters can contain thousands. Such grammars were measured to compile with half of this size. The usual 8
MiB would overflow, which ends the process. Memory is only used as deep as the recursion goes."""

T = TypeVar("T")

_lock = threading.Lock()


def on_deep_stack(function: Callable[[], T]) -> T:
    """Run `function` on a thread with a large stack; return what it returns, or raise what it raises."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            result.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _lock:
        # The setting is for the whole process: another thread that starts now gets a larger stack as well.
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()
