"""Whether other threads run while a library computes."""

import threading
import time
from collections.abc import Callable


def turns_during(work: Callable[[], object]) -> int:
    """Return how often another thread had the interpreter while `work` ran on this one."""
    over, begun, turns = threading.Event(), threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            begun.set()
            time.sleep(0.001)
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    begun.wait()
    before = turns
    work()
    during = turns - before
    over.set()
    thread.join()
    return during
