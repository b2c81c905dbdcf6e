import threading

import pytest

from triton_models.serving.starts import AT_ONCE, LOSSES_BORNE, Starts, StartsLostError


def hold(starts: Starts, until: threading.Event) -> threading.Thread:
    holding = threading.Event()

    def run() -> None:
        with starts.place(1):
            holding.set()
            until.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert holding.wait(10)
    return thread


def test_only_so_many_begin_at_once_and_a_lost_place_is_replaced() -> None:
    starts, until = Starts(), threading.Event()
    threads = [hold(starts, until) for _ in range(AT_ONCE)]
    with pytest.raises(TimeoutError), starts.place(0.01):
        pass
    starts.replace_lost(60)
    with pytest.raises(TimeoutError), starts.place(0.01):
        pass
    starts.replace_lost(0)
    threads += [hold(starts, until) for _ in range(AT_ONCE)]
    until.set()
    for thread in threads:
        thread.join(10)
    # The lost ones came back after all: there are no more places than before.
    until.clear()
    threads = [hold(starts, until) for _ in range(AT_ONCE)]
    with pytest.raises(TimeoutError), starts.place(0.01):
        pass
    until.set()
    for thread in threads:
        thread.join(10)


def test_losses_can_be_borne_so_far_only() -> None:
    starts, until = Starts(), threading.Event()
    threads = []
    for _ in range(LOSSES_BORNE):
        threads.append(hold(starts, until))
        starts.replace_lost(0)
    threads.append(hold(starts, until))
    with pytest.raises(StartsLostError):
        starts.replace_lost(0)
    until.set()
    for thread in threads:
        thread.join(10)
