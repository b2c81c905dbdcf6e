import math
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.autoscaling import DAY_S, Day, Rule, Scaler, make_day, simulate
from gateway.commands.deploy import assemble

RULE = Rule(
    least=0,
    most=4,
    waiting=8,
    running=10,
    poll_s=15,
    cooldown_s=900,
    up_window_s=60,
    up_every_s=60,
    down_window_s=900,
    down_every_s=300,
)


def sizes(scaler: Scaler, *, start: float, polls: int, waiting: int = 0, running: int = 0) -> list[int]:
    times = [start + number * RULE.poll_s for number in range(polls)]
    return [scaler.decide(now, waiting=waiting, running=running) for now in times]


def test_the_rule_is_the_manifests() -> None:
    (manifest,) = assemble("keda")
    rule = Rule.of_manifest(least=1, most=3, running=16)
    assert (rule.least, rule.most, rule.running) == (1, 3, 16)
    assert rule.poll_s == manifest["spec"]["pollingInterval"]
    assert rule.cooldown_s == manifest["spec"]["cooldownPeriod"]
    assert replace(rule, least=0, most=4, running=10) == RULE


def test_the_first_request_starts_one_and_silence_ends_the_last() -> None:
    scaler = Scaler(RULE, 0)
    assert sizes(scaler, start=0, polls=3) == [0, 0, 0]
    assert sizes(scaler, start=60, polls=1, running=1) == [1]
    silence = sizes(scaler, start=75, polls=70)
    # The last sign of life was at 60.
    assert silence.index(0) == (60 + RULE.cooldown_s - 75) / RULE.poll_s
    assert set(silence[silence.index(0) :]) == {0}


def test_a_least_number_stays() -> None:
    assert set(sizes(Scaler(replace(RULE, least=1), 1), start=0, polls=200)) == {1}


@pytest.mark.parametrize("load", [{"waiting": 100}, {"running": 100}])
def test_more_come_one_a_minute_and_no_more_than_allowed(load: dict[str, int]) -> None:
    found = sizes(Scaler(RULE, 1), start=0, polls=40, **load)
    grown = [number * RULE.poll_s for number, (few, many) in enumerate(pairwise(found), 1) if many > few]
    assert found[-1] == 4
    assert all(many - few in (0, 1) for few, many in pairwise([1, *found]))
    assert all(later - earlier >= RULE.up_every_s for earlier, later in pairwise(grown))


def test_a_moment_of_load_changes_nothing() -> None:
    scaler = Scaler(replace(RULE, least=1), 1)
    sizes(scaler, start=0, polls=8, running=5)
    assert sizes(scaler, start=120, polls=2, waiting=100, running=10) == [1, 1]
    assert set(sizes(scaler, start=150, polls=20, running=5)) == {1}


def test_what_is_near_its_target_changes_nothing() -> None:
    assert set(sizes(Scaler(RULE, 2), start=0, polls=100, running=21)) == {2}
    assert max(sizes(Scaler(RULE, 2), start=0, polls=100, running=23)) == 3


def test_fewer_after_a_quarter_of_an_hour_one_at_a_time() -> None:
    scaler = Scaler(replace(RULE, least=1), 4)
    sizes(scaler, start=0, polls=4, running=40)
    found = sizes(scaler, start=60, polls=200, running=1)
    shrunk = [
        60 + number * RULE.poll_s for number, (many, few) in enumerate(pairwise(found), 1) if few < many
    ]
    assert found[-1] == 1
    assert shrunk[0] > 45 + RULE.down_window_s
    assert all(later - earlier >= RULE.down_every_s for earlier, later in pairwise(shrunk))


def test_waits_of_a_fixed_number() -> None:
    day = Day(arrivals=[0.5, 1.0, 1.5], durations=[10.0, 10.0, 10.0])
    row = simulate("1", day, replace(RULE, least=1, most=1), slots=1, start_s=0)
    assert (row.requests, row.lost) == (3, 0)
    assert (row.wait_p50, row.wait_longest) == (9.5, 19.0)
    assert row.gpu_hours == 24
    assert simulate("2", day, replace(RULE, least=2, most=2), slots=2, start_s=0).wait_longest == 0
    impatient = simulate("1", day, replace(RULE, least=1, most=1), slots=1, start_s=0, timeout_s=10)
    assert impatient.lost == 1


def test_a_start_from_zero_costs_its_time_and_is_paid_for() -> None:
    day = Day(arrivals=[3600.5], durations=[10.0])
    row = simulate("0", day, RULE, slots=1, start_s=100)
    # Noticed at the next poll.
    assert row.wait_longest == pytest.approx(14.5 + 100)
    assert row.most_at_once == 1
    assert 0 < row.gpu_hours * 3600 <= 14.5 + 100 + 10 + 300 + RULE.cooldown_s + RULE.poll_s


def test_a_seed_makes_a_day() -> None:
    def day(seed: int) -> Day:
        return make_day(seed, peak=0.5, night_per_hour=1, bursts=2, mean_s=8)

    made = day(1)
    assert made == day(1) != day(2)
    assert list(made.arrivals) == sorted(made.arrivals)
    assert all(0 <= at < DAY_S for at in made.arrivals)
    # Half a request per second at the top, a sine of fifteen hours, two bursts, and a night.
    expected = 0.5 * 15 * 3600 * 2 / math.pi
    assert 0.9 * expected < len(made.arrivals) < 1.2 * expected
    assert 7 < sum(made.durations) / len(made.durations) < 9
    rule = Rule.of_manifest(least=0, most=3, running=4)
    rows = [simulate("0 to 3", day(1), rule, slots=8, start_s=180) for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0].gpu_hours < 3 * 24
