"""Predicts closed loops: the real scheduler, on a virtual clock: `python -m bench.scheduling`.

Nothing is computed. A step takes as long as one of its kind was measured to take on an H200 with
ChatGLM3-6B's shape (bench/log/2026-11.md), so the figures show what a change of the scheduler's
rules does, not what a server does.
"""

import heapq
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from itertools import pairwise

import click

from bench.rows import table
from gateway.commands.bench import COUNT, listed
from gateway.commands.load_rows import Answer, LoadRow, summarise
from triton_models.engine.blocks import BlockManager
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import Request, Sequence, SequenceState
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Step

_Known = Values[tuple[int, float]]

_DECODES_S: _Known = (
    (0, 0.0),
    (1, 0.00357),
    (8, 0.00368),
    (32, 0.00407),
    (64, 0.0044),
    (128, 0.00492),
    (256, 0.00714),
    (512, 0.0126),
)
"""Seconds of a step without prompts, by its decodes."""

_PROMPTS_S: _Known = (
    (0, 0.0),
    (1, 0.0036),
    (259, 0.0075),
    (512, 0.0113),
    (1024, 0.0205),
    (2048, 0.0389),
    (4096, 0.0762),
)
"""Seconds of a step with prompts, by its tokens."""

_DECODE_BESIDE_S = 6e-6
"""What a decode's attention adds to a step with prompts."""

_WAY_S = 0.002
"""From the client to the scheduler, and from a step's end to the client."""

_APART_S = 0.00004
"""Requests that are sent at once reach the scheduler one after the other: in the first edition, 0.3 to 0.6 ms
apart."""

_BLOCK_SIZE = 16
_BLOCKS = 200_000
"""More than is ever used: nothing is preempted."""


def step_s(step: Step) -> float:
    """Return how long the device takes for a step, in seconds."""
    tokens = sum(chunk.count for chunk in step.prefills)
    if not tokens:
        return _between(_DECODES_S, len(step.decodes))
    return _between(_PROMPTS_S, tokens + len(step.decodes)) + len(step.decodes) * _DECODE_BESIDE_S


def _between(known: _Known, count: int) -> float:
    for (low, low_s), (high, high_s) in pairwise(known):
        if count <= high:
            return low_s + (high_s - low_s) * (count - low) / (high - low)
    high, high_s = known[-1]
    return high_s * count / high


@dataclass(slots=True)
class _Client:
    """The request that a client is waiting for."""

    answer: Answer
    sequence: Sequence


@dataclass(slots=True)
class ClosedLoops:
    """Clients that each send the next request when the last one is answered, of one scheduler."""

    scheduler: Scheduler
    prompt: int
    out: int
    apart_s: float = _APART_S
    now: float = 0.0
    """Seconds on the virtual clock."""
    _number: int = 0
    _arriving: list[tuple[float, int]] = field(default_factory=list)
    """Time of arrival and number of requests on their way, as a heap."""
    _open: dict[str, _Client] = field(default_factory=dict)

    def measure(self, clients: int, requests: int) -> LoadRow:
        """Let `clients` clients send `requests` requests in all; the scheduler goes on from where it was."""
        answers: list[Answer] = []
        unsent = requests - self._send(min(clients, requests), self.now)
        launched: Step | None = None
        ends = self.now
        while len(answers) < requests:
            self._admit()
            # As the engine does, launch a step while the one before it runs.
            step = self.scheduler.schedule()
            step.advance()
            if launched is not None:
                self.now = max(self.now, ends)
                finished = self._take_tokens(launched)
                answers += finished
                unsent -= self._send(min(len(finished), unsent), self.now + _WAY_S)
            elif not step.chunks:
                self.now = self._arriving[0][0]
            launched = step if step.chunks else None
            ends = max(self.now, ends) + step_s(step)
        return summarise(answers, clients=clients, rate=0.0)

    def _send(self, count: int, at: float) -> int:
        for place in range(count):
            name = str(self._number)
            ids = (self._number, *range(self.prompt - 1))  # like no other in its first block
            request = Request(request_id=name, prompt_ids=ids, sampling=SamplingParams(max_tokens=self.out))
            sequence = Sequence(request, arrival=self._number, arrived_at=at, max_tokens=self.out)
            self._open[name] = _Client(Answer(sent=at, prompt_tokens=self.prompt), sequence)
            heapq.heappush(self._arriving, (at + _WAY_S + place * self.apart_s, self._number))
            self._number += 1
        return count

    def _admit(self) -> None:
        while self._arriving and self._arriving[0][0] <= self.now:
            _, number = heapq.heappop(self._arriving)
            self.scheduler.add(self._open[str(number)].sequence)

    def _take_tokens(self, step: Step) -> list[Answer]:
        """Give each request of the step its token; return the answers that end with it."""
        ended = []
        for chunk in step.chunks:
            if not chunk.samples:
                continue
            name = chunk.sequence.request.request_id
            answer = self._open[name].answer
            chunk.sequence.append(0)
            answer.pieces.append(self.now + _WAY_S)
            if chunk.sequence.generated == self.out:
                self.scheduler.remove(chunk.sequence)
                chunk.sequence.move_to(SequenceState.FINISHED)
                answer.tokens, answer.ended = self.out, answer.pieces[-1]
                ended.append(self._open.pop(name).answer)
        return ended


def make_scheduler(
    *, max_running: int, max_batched_tokens: int, burst_tokens: int, burst_steps: int
) -> Scheduler:
    """Return a scheduler with room for everything."""
    settings = EngineSettings(
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        burst_tokens=burst_tokens,
        burst_steps=burst_steps,
        draft_tokens=0,
    )
    return Scheduler(BlockManager(_BLOCKS, _BLOCK_SIZE), settings)


@click.command(help=__doc__)
@listed("--conc", COUNT, default="1,8,32,64,128,256,512", show_default=True)
@click.option("--rounds", default=2, show_default=True, help="requests of each client")
@click.option("--repeats", default=3, show_default=True, help="one after the other, of the same scheduler")
@click.option("--ids", default=259, show_default=True, help="tokens of each prompt")
@click.option("--out", default=256, show_default=True, help="tokens of each answer")
@click.option("--apart-ms", default=1000 * _APART_S, show_default=True, help="between requests sent at once")
@click.option("--max-running", default=512, show_default=True)
@click.option("--max-batched-tokens", default=1024, show_default=True)
@click.option("--burst-tokens", default=2048, show_default=True)
@click.option("--burst-steps", default=4, show_default=True)
def main(
    *,
    conc: tuple[int, ...],
    rounds: int,
    repeats: int,
    ids: int,
    out: int,
    apart_ms: float,
    **settings: int,
) -> None:
    """Predict, print."""
    loops = ClosedLoops(make_scheduler(**settings), prompt=ids, out=out, apart_s=apart_ms / 1000)
    rows = [loops.measure(clients, rounds * clients) for clients in conc for _ in range(repeats)]
    click.echo(table(LoadRow, rows, leave_out={"rate", "failed", "within", "pieces", "error"}))


if __name__ == "__main__":
    main()
