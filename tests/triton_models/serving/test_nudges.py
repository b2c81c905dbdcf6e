import threading
import time

import pytest

from tests.triton_models.serving.fakes import TIMEOUT_S, wait_until
from triton_models.serving import nudges
from triton_models.serving.nudges import AT_ONCE, LOSSES_BORNE, Nudges
from triton_models.serving.starts import Starts

SOME_NUDGES_S = 5 * nudges.AFTER_S


class Entry:
    """Counts nudges, and answers them while `answers` is set."""

    def __init__(self) -> None:
        self.nudged = 0
        self.answers = threading.Event()
        self._counting = threading.Lock()

    def nudge(self) -> None:
        with self._counting:
            self.nudged += 1
        self.answers.wait(TIMEOUT_S)

    def is_left_alone(self) -> bool:
        before = self.nudged
        time.sleep(SOME_NUDGES_S)
        return self.nudged == before


def test_a_start_that_takes_long_is_nudged_until_a_nudge_is_answered() -> None:
    starts, entry = Starts(), Entry()
    nudging = Nudges(starts, entry.nudge)
    for _ in range(2):
        before = entry.nudged
        with starts.place(1):
            nudging.begin()
            wait_until(lambda before=before: entry.nudged == before + AT_ONCE)
            assert entry.is_left_alone(), "more than that wait"
            entry.answers.set()
            wait_until(entry.is_left_alone)
            entry.answers.clear()


def test_each_start_has_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nudges, "AFTER_S", 1.0)
    starts, entry = Starts(), Entry()
    entry.answers.set()
    nudging = Nudges(starts, entry.nudge)
    begin = time.monotonic()
    while time.monotonic() - begin < 3:
        with starts.place(1):
            nudging.begin()
            started = time.monotonic()
            time.sleep(0.05)
            if time.monotonic() - started > 0.5:
                return  # this process was stopped for so long that there may be one
    assert entry.nudged == 0


def test_nudges_without_an_answer_are_given_up_so_often_only() -> None:
    starts, entry = Starts(), Entry()
    nudging = Nudges(starts, entry.nudge)
    with starts.place(1):
        nudging.begin()
        for number in range(AT_ONCE, AT_ONCE + LOSSES_BORNE + 1, AT_ONCE):
            wait_until(lambda number=number: entry.nudged == number)
            assert entry.is_left_alone()
            nudging.replace_lost(0)
        assert entry.is_left_alone()
        assert entry.nudged == AT_ONCE + LOSSES_BORNE
    entry.answers.set()
