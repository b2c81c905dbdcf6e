"""Simulates a day of requests against what scales the Tritons: `python -m bench.autoscaling`.

The scaler is that of `gateway/manifests/keda`, with its own figures: KEDA decides between none and one, the
HPA that KEDA makes decides the rest. What is simple here: a Triton answers so many requests at once, the
others wait in their order; an answer takes its time however many there are beside it; metrics are as new as
the question. Times are seconds, and begin at midnight.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import click
import numpy as np

from bench.rows import table
from gateway.commands.deploy import assemble
from gateway.commands.load_rows import percentile

DAY_S: Final = 86_400
_HOUR_S: Final = 3600
_ASKED_S: Final = 300.0
"""For so long a request counts as running in the scaler's question; `offset 5m` there."""
_TOLERANCE: Final = 0.1
"""Kubernetes' own: an HPA does nothing about a value so near to its target."""
_BURST_S: Final = 300
_LONG_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When the number of Tritons changes."""

    least: int
    most: int
    waiting: float
    """Requests that may wait, for each Triton."""
    running: float
    """Requests that a Triton should have."""
    poll_s: float
    cooldown_s: float
    """Of silence, before the last one goes."""
    up_window_s: float
    """For so long more must have been wanted all the time, as fewer for `down_window_s`."""
    up_every_s: float
    """One more at most in such a time, as one fewer in `down_every_s`."""
    down_window_s: float
    down_every_s: float

    @classmethod
    def of_manifest(cls, *, least: int, most: int, running: float) -> "Rule":
        """Return the rule of the manifest; what a Triton should have depends on its GPU."""
        (scaler,) = assemble("keda")
        spec = scaler["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        waiting = next(each for each in spec["triggers"] if each["name"] == "waiting")

        def steps(direction: str) -> tuple[float, float]:
            (policy,) = behavior[direction]["policies"]
            if (policy["type"], policy["value"]) != ("Pods", 1):
                raise ValueError("the simulation knows steps of one pod only")
            return behavior[direction]["stabilizationWindowSeconds"], policy["periodSeconds"]

        up, down = steps("scaleUp"), steps("scaleDown")
        return cls(
            least=least,
            most=most,
            waiting=float(waiting["metadata"]["threshold"]),
            running=running,
            poll_s=spec["pollingInterval"],
            cooldown_s=spec["cooldownPeriod"],
            up_window_s=up[0],
            up_every_s=up[1],
            down_window_s=down[0],
            down_every_s=down[1],
        )


@dataclass(slots=True)
class Scaler:
    """Decides, at each poll, how many Tritons there should be.

    Args:
        rule: by which.
        size: how many there are.
    """

    rule: Rule
    size: int
    _active_at: float = -math.inf
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    """What was wanted at each poll within the longer window."""
    _grown_at: float = -math.inf
    _shrunk_at: float = -math.inf

    def decide(self, now: float, *, waiting: int, running: int) -> int:
        """Return the new number, which is `size` then."""
        rule = self.rule
        if waiting or running:
            self._active_at = now
        if self.size == 0:
            if waiting or running:
                self.size, self._grown_at = 1, now
                self._wanted.clear()
            return self.size
        if rule.least == 0 and now - self._active_at >= rule.cooldown_s:
            self.size = 0
            return 0
        wanted = max(self._for(waiting, rule.waiting), self._for(running, rule.running))
        wanted = min(max(wanted, rule.least, 1), rule.most)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - max(rule.up_window_s, rule.down_window_s):
            self._wanted.popleft()
        if min(self._since(now - rule.up_window_s)) > self.size and now - self._grown_at >= rule.up_every_s:
            self.size, self._grown_at = self.size + 1, now
        elif (
            max(self._since(now - rule.down_window_s)) < self.size
            and now - self._shrunk_at >= rule.down_every_s
        ):
            self.size, self._shrunk_at = self.size - 1, now
        return self.size

    def _for(self, value: float, target: float) -> int:
        """Return the number of Tritons at which each has its `target` of `value`."""
        ratio = value / (target * self.size)
        return self.size if abs(1 - ratio) <= _TOLERANCE else math.ceil(value / target)

    def _since(self, start: float) -> list[int]:
        return [wanted for at, wanted in self._wanted if at >= start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The requests of a day, in their order."""

    arrivals: Sequence[float]
    durations: Sequence[float]
    """Of each answer."""


def make_day(seed: int, *, peak: float, night_per_hour: float, bursts: int, mean_s: float) -> Day:
    """Make a day: Poisson arrivals at a rate that rises from 7 h to half past 14 and falls until 22 h.

    Args:
        seed: the same one makes the same day.
        peak: requests per second at half past 14, without bursts.
        night_per_hour: requests per hour that come at any time.
        bursts: times between 7 h and 22 h at which the rate is doubled for five minutes.
        mean_s: mean duration of an answer; they are lognormal.
    """
    dice = np.random.default_rng(seed)
    hours = np.arange(DAY_S) / _HOUR_S
    first, last = 7.0, 22.0
    at_day = np.sin(np.pi * np.clip((hours - first) / (last - first), 0, 1))
    rates = peak * at_day
    for start in dice.uniform(first * _HOUR_S, last * _HOUR_S - _BURST_S, bursts).astype(int):
        rates[start : start + _BURST_S] *= 2
    counts = dice.poisson(rates + night_per_hour / _HOUR_S)
    arrivals = np.sort(np.repeat(np.arange(DAY_S), counts) + dice.random(counts.sum()))
    sigma = 0.8
    durations = dice.lognormal(math.log(mean_s) - sigma**2 / 2, sigma, len(arrivals))
    return Day(arrivals=arrivals.tolist(), durations=durations.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One day under one rule. Times are seconds of waiting, before an answer begins."""

    scaling: str
    start_s: float
    requests: int
    lost: int
    """Given up: they had waited for the gateway's `request_timeout_s`."""
    wait_p50: float
    wait_p99: float
    wait_longest: float
    waited_over_10_s: int
    most_at_once: int
    gpu_hours: float


def simulate(
    name: str, day: Day, rule: Rule, *, slots: int, start_s: float, timeout_s: float = 600.0
) -> ScalingRow:
    """Run `day` under `rule`; where its `least` and `most` are the same, nothing scales.

    Args:
        name: of the row.
        day: the requests.
        rule: the scaler's.
        slots: answers that a Triton works on at once.
        start_s: from a pod's creation until it serves.
        timeout_s: longest wait of a request.
    """
    scaler = Scaler(rule, rule.least)
    ready = rule.least
    starting: deque[float] = deque()
    """When each pod that was created will serve."""
    ends: list[float] = []
    queue: deque[int] = deque()
    waits: list[float] = []
    lost = 0
    gpu_s, most = 0.0, scaler.size
    asked_at = -math.inf
    arrived = 0
    poll_at, polled_at = 0.0, 0.0
    arrivals, durations = day.arrivals, day.durations
    while arrived < len(arrivals) or queue or ends or poll_at < DAY_S:
        now = min(
            poll_at,
            ends[0] if ends else math.inf,
            starting[0] if starting else math.inf,
            arrivals[arrived] if arrived < len(arrivals) else math.inf,
        )
        if ends and ends[0] == now:
            heapq.heappop(ends)
        elif starting and starting[0] == now:
            starting.popleft()
            ready += 1
        elif arrived < len(arrivals) and arrivals[arrived] == now:
            queue.append(arrived)
            asked_at = now
            arrived += 1
        else:
            gpu_s += scaler.size * (min(now, DAY_S) - min(polled_at, DAY_S))
            polled_at, poll_at = now, now + rule.poll_s
            # What waits while there is no Triton is refused by the gateway, and asks again.
            waiting = len(queue) if ready else 0
            if queue and not ready:
                asked_at = now
            before = scaler.size
            asked = now - asked_at <= _ASKED_S
            scaler.decide(now, waiting=waiting, running=len(ends) + asked)
            starting.extend([now + start_s] * (scaler.size - before))
            for _ in range(before - scaler.size):
                if starting:
                    starting.pop()
                else:
                    ready -= 1  # its answers end, and no others begin there
            most = max(most, scaler.size)
        while queue and len(ends) < ready * slots:
            each = queue.popleft()
            waited = now - arrivals[each]
            if waited > timeout_s:
                lost += 1
                continue
            waits.append(waited)
            heapq.heappush(ends, now + durations[each])
    gpu_s += scaler.size * max(DAY_S - polled_at, 0.0)
    return ScalingRow(
        scaling=name,
        start_s=start_s,
        requests=len(arrivals),
        lost=lost,
        wait_p50=percentile(waits, 50),
        wait_p99=percentile(waits, 99),
        wait_longest=max(waits, default=0.0),
        waited_over_10_s=sum(waited > _LONG_S for waited in waits),
        most_at_once=most,
        gpu_hours=gpu_s / _HOUR_S,
    )


def measure(seed: int, *, slots: int, mean_s: float, peak: float, most: int) -> list[ScalingRow]:
    """Return the rows of fixed sizes, and of the rule with different starts and least numbers."""
    day = make_day(seed, peak=peak, night_per_hour=1, bursts=12, mean_s=mean_s)
    rule = Rule.of_manifest(least=0, most=most, running=slots / 2)
    where: dict[str, Any] = {"slots": slots}
    rows = [
        simulate(f"{size} always", day, replace(rule, least=size, most=size), start_s=0.0, **where)
        for size in range(1, most + 1)
    ]
    for start_s in (60.0, 180.0, 600.0):
        rows += [
            simulate(f"{least} to {most}", day, replace(rule, least=least), start_s=start_s, **where)
            for least in (0, 1, 2)
        ]
    later = replace(rule, least=1, running=slots * 7 / 8)
    only_waiting = replace(rule, least=1, running=math.inf)
    rows += [
        simulate(f"1 to {most}, {later.running:g} running for each", day, later, start_s=180.0, **where),
        simulate(f"1 to {most}, by waiting alone", day, only_waiting, start_s=180.0, **where),
    ]
    return rows


@click.command()
@click.option("--seed", default=1, show_default=True)
@click.option("--slots", default=32, show_default=True, help="answers that a Triton works on at once")
@click.option("--mean-s", default=8.0, show_default=True, help="mean duration of an answer")
@click.option("--peak", default=10.0, show_default=True, help="requests per second at the day's top")
@click.option("--most", default=6, show_default=True, help="Tritons at once")
def main(seed: int, slots: int, mean_s: float, peak: float, most: int) -> None:
    """Print the table of one day."""
    rows = measure(seed, slots=slots, mean_s=mean_s, peak=peak, most=most)
    click.echo(table(ScalingRow, rows))


if __name__ == "__main__":
    main()
