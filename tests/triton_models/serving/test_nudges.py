import threading
import time

import pytest

from tests.triton_models.serving.fakes import TIMEOUT_S, wait_until
from triton_models.serving import nudges
from triton_models.serving.nudges import LOSSES_BORNE, Nudges
from triton_models.serving.starts import Starts

SOME_NUDGES_S = 5 * nudges.AFTER_S


class Entry:
    """Counts nudges, and answers them while `answers` is set."""

    def __init__(self) -> None:
        self.nudged = 0
        self.answers = threading.Event()
        self.answers.set()

    def nudge(self) -> None:
        self.nudged += 1
        self.answers.wait(TIMEOUT_S)

    def is_left_alone(self) -> bool:
        before = self.nudged
        time.sleep(SOME_NUDGES_S)
        return self.nudged == before


def test_starts_that_take_long_are_nudged_until_they_are_over() -> None:
    starts, entry = Starts(), Entry()
    nudging = Nudges(starts, entry.nudge)
    for _ in range(2):
        before = entry.nudged
        with starts.place(1):
            nudging.begin()
            wait_until(lambda seen=before: entry.nudged >= seen + 3)
        wait_until(entry.is_left_alone)


def test_starts_that_are_soon_over_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nudges, "AFTER_S", 60.0)
    starts, entry = Starts(), Entry()
    nudging = Nudges(starts, entry.nudge)
    for _ in range(100):
        with starts.place(1):
            nudging.begin()
    time.sleep(SOME_NUDGES_S)
    assert entry.nudged == 0


def test_one_nudge_at_a_time_and_those_without_an_answer_are_given_up_so_often_only() -> None:
    starts, entry = Starts(), Entry()
    nudging = Nudges(starts, entry.nudge)
    entry.answers.clear()
    with starts.place(1):
        nudging.begin()
        for number in range(1, LOSSES_BORNE + 2):
            wait_until(lambda number=number: entry.nudged == number)
            time.sleep(SOME_NUDGES_S)
            assert entry.nudged == number
            nudging.replace_lost(0)
        time.sleep(SOME_NUDGES_S)
        assert entry.nudged == LOSSES_BORNE + 1
    entry.answers.set()
