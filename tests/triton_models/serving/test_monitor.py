"""How often streams are looked at, which is what the monitor costs."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from triton_models.serving.monitor import PERIOD_S, Monitor

TURNS = 3


@dataclass
class Stream:
    key: str
    looks: Counter[str]
    gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client_gone(self) -> bool:
        self.looks[self.key] += 1
        return self.gone

    def keep_alive(self, interval_s: float) -> None:
        assert 2 - PERIOD_S <= interval_s < 2, "so that the next look is not too late"


class Watch:
    def __init__(self, count: int) -> None:
        self.looks: Counter[str] = Counter()
        self.streams = [Stream(str(number), self.looks) for number in range(count)]
        self.left: list[str] = []
        self.monitor = Monitor(lambda: self.streams, lambda stream: self.left.append(stream.key), 2.0)


def test_many_streams_cost_one_look_each_in_a_period() -> None:
    watch = Watch(512)
    for turn in range(4 * TURNS):
        before = watch.looks.total()
        watch.monitor.look(turn)
        assert watch.looks.total() - before < 512 / 2, "the work of a period is spread over it"
    assert set(watch.looks.values()) == {4}
    assert len(watch.looks) == 512


def test_few_streams_are_looked_at_in_every_turn() -> None:
    watch = Watch(32)
    for turn in range(TURNS):
        watch.monitor.look(turn)
    assert set(watch.looks.values()) == {TURNS}


def test_no_stream_is_passed_over_because_others_come_and_go() -> None:
    watch = Watch(500)
    for turn in range(TURNS):
        # Those that end stand before the others, those that come behind them.
        watch.streams = [
            *watch.streams[40:],
            *(Stream(f"new {turn} {each}", watch.looks) for each in range(9)),
        ]
        watch.monitor.look(turn)
    assert all(watch.looks[str(number)] == 1 for number in range(40 * TURNS, 500))


def test_a_client_that_left_is_told_of_within_a_period() -> None:
    watch = Watch(500)
    watch.streams[77].gone = True
    for turn in range(5, 5 + TURNS):
        watch.monitor.look(turn)
    assert watch.left == ["77"]
    assert PERIOD_S < 0.25


def test_a_stream_that_is_busy_in_its_turn_has_the_next_one_too() -> None:
    watch = Watch(100)
    busy = watch.streams[3]
    with busy.lock:
        for turn in range(TURNS):
            watch.monitor.look(turn)
    assert watch.looks["3"] == 0
    own = hash("3") % TURNS
    other = own + 1
    watch.monitor.look(own)
    with busy.lock:
        watch.monitor.look(own)
    watch.monitor.look(other)
    watch.monitor.look(other)
    assert watch.looks["3"] == 2
