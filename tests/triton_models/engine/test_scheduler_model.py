"""A model check: scheduler, block manager and prefix cache under random histories, on a device of dicts."""

from collections import Counter
from typing import Any, ClassVar

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.triton_models.engine.dict_device import BLOCK_SIZE, DictDevice, next_token
from triton_models.engine.blocks import PADDING_BLOCK, BlockManager
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import Request, Sequence, SequenceState
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Step

MAX_RUNNING, BUDGET, CONTEXT = 7, 7, 48
LARGE_CACHE = 60
"""Blocks."""


OPTIONS = st.fixed_dictionaries(
    {
        "priority": st.integers(-1, 1),
        "deadline": st.sampled_from([None, None, None, 3.0, 6.0, 9.0]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        "shares_tail": st.booleans(),
    }
)

PROMPTS = st.builds(
    lambda common, rest: ([0] * common + rest)[: CONTEXT - 1],
    st.integers(0, CONTEXT - 2) | st.just(30),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)

BURSTS = st.builds(
    lambda short, long: short + long,
    st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=4), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=20), min_size=3, max_size=5),
)
"""Prompts of which the first two fit a step, and all together fill six, or six large ones."""

STEPS = st.integers(0, 3)
"""Few enough to leave prompts in their middle."""


class SchedulerModel(RuleBasedStateMachine):
    """Random arrivals, ends and steps over a cache that is far too small."""

    arrivals = 0
    open: tuple[Sequence, ...] | list[Sequence] = ()
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        blocks=st.sampled_from([12, 14, 18, LARGE_CACHE, LARGE_CACHE]),
        overlap=st.booleans(),
        burst_steps=st.sampled_from([0, 1, 3, 3]),
        burst_tokens=st.sampled_from([BUDGET, BUDGET, 2 * BUDGET]),
        draft_tokens=st.sampled_from([0, 1, 4]),
    )
    def start(
        self,
        blocks: int,
        *,
        overlap: bool,
        burst_steps: int,
        burst_tokens: int,
        draft_tokens: int,
    ) -> None:
        self.blocks = BlockManager(blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.blocks,
            EngineSettings(
                max_running=MAX_RUNNING,
                max_batched_tokens=BUDGET,
                burst_steps=burst_steps,
                burst_tokens=burst_tokens,
                draft_tokens=draft_tokens,
            ),
        )
        self.burst_tokens = burst_tokens
        self.burst_steps, self.in_a_row = burst_steps, 0
        self.overlap = overlap
        self.device = DictDevice()
        self.launched: list[tuple[Sequence, int]] | None = None
        self.open: list[Sequence] = []
        self.ended: list[Sequence] = []
        """Those that share their tails, the newest last."""
        self.arrivals = 0

    @rule(
        prompt=PROMPTS,
        count=st.integers(1, CONTEXT),
        siblings=st.integers(1, 3),
        options=OPTIONS,
        steps=STEPS,
    )
    def add(self, prompt: list[int], count: int, siblings: int, options: dict[str, Any], steps: int) -> None:
        for _ in range(siblings):
            self.open_request(prompt, count, **options)
        self.steps(steps)

    @rule(prompts=BURSTS, count=st.integers(1, 3), steps=STEPS)
    def burst(self, prompts: list[list[int]], count: int, steps: int) -> None:
        # A smaller cache would never admit them together.
        longest = CONTEXT if self.blocks.blocks == LARGE_CACHE else 6
        for prompt in prompts:
            options: dict[str, Any] = {"priority": -1, "deadline": None}
            self.open_request(prompt[:longest], count, **options, prefix_cache=True, shares_tail=False)
        self.steps(steps)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 9), options=OPTIONS, steps=STEPS)
    def fork(self, data: st.DataObject, count: int, options: dict[str, Any], steps: int) -> None:
        """Go on from what another has so far; one in the middle of its prompt may be overtaken."""
        prefilling = [each for each in self.open if each.state is SequenceState.PREFILL]
        other = data.draw(st.sampled_from(prefilling or self.open))
        priority = other.request.priority + options["priority"]
        self.open_request(other.tokens[: CONTEXT - 1], count, **{**options, "priority": priority})
        self.steps(steps)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), newest=st.lists(st.integers(0, 2), min_size=1, max_size=3), steps=STEPS)
    def branch(self, data: st.DataObject, newest: list[int], steps: int) -> None:
        """Go on after one that has ended, as beams do: each with another token."""
        other = data.draw(st.sampled_from(self.ended[-3:]))
        options = {"prefix_cache": other.request.prefix_cache, "shares_tail": True}
        known = other.tokens[: CONTEXT - 2]
        for token in newest:
            self.open_request([*known[:-1], token], 1, priority=0, deadline=None, **options)
        self.steps(steps)

    def open_request(self, prompt: list[int], count: int, **options: Any) -> None:
        count = min(count, CONTEXT - len(prompt))
        request = Request(
            request_id=str(self.arrivals),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=count),
            **options,
        )
        new = Sequence(request, arrival=self.arrivals, arrived_at=0.0, max_tokens=count)
        self.arrivals += 1
        self.open.append(new)
        self.device.texts[new] = list(prompt)
        self.scheduler.add(new)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), invalid=st.booleans())
    def end(self, data: st.DataObject, *, invalid: bool) -> None:
        self.close(data.draw(st.sampled_from(self.open)), invalid=invalid)

    @rule(now=st.integers(1, 9))
    def pass_deadlines(self, now: int) -> None:
        late = {each for each in self.open if each.request.deadline and each.request.deadline <= now}
        expired = self.scheduler.expired(now)
        assert set(expired) == late
        for each in expired:
            self.close(each)

    def close(self, each: Sequence, *, invalid: bool = False) -> None:
        held = list(each.blocks)
        self.seen["found"] += bool(each.cached_tokens)
        self.scheduler.remove(each, invalid=invalid)
        each.move_to(SequenceState.FINISHED)
        self.open.remove(each)
        if each.request.shares_tail:
            self.ended.append(each)
        assert (each.blocks, each.slot) == ([], None)
        if invalid:
            assert not set(held) & self.scheduler._prefixes._keys.keys()

    @rule(steps=st.integers(1, 20))
    def more_steps(self, steps: int) -> None:
        self.steps(steps)

    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """The engine's step: with overlap, the next one is launched before this one's tokens are known."""
        current = self.launched or self.launch()
        self.launched = self.launch() if self.overlap else None
        for sequence, token in current:
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.append(token)
            if sequence.generated >= sequence.max_tokens:
                self.close(sequence)

    def launch(self) -> list[tuple[Sequence, int]]:
        running = list(self.scheduler.running)
        decoding = [
            each
            for each in running
            if each.state is SequenceState.DECODE
            and not (each.in_flight and each.generated + 1 >= each.max_tokens)
        ]
        tails = self.tails()
        batch = self.scheduler.schedule()
        self.seen["steps"] += 1
        self.seen["preemptions"] += batch.preemptions
        self.seen["copies"] += len(batch.copies)
        self.seen["taken"] += sum(
            chunk.start % BLOCK_SIZE > 0 and chunk.sequence.blocks[chunk.start // BLOCK_SIZE] in tails
            for chunk in batch.prefills
        )
        self.check(batch, running, decoding)
        sampled = self.device.compute(batch)
        batch.advance()
        return sampled

    def tails(self) -> set[int]:
        keys = self.scheduler._prefixes._keys
        return {block for block, key in keys.items() if len(key) < 4 * (1 + BLOCK_SIZE)}

    def check(self, batch: Step, running: list[Sequence], decoding: list[Sequence]) -> None:
        in_flight = any(each.in_flight for each in self.open)
        assert batch.chunks or in_flight or not self.open
        tokens = sum(chunk.count for chunk in batch.chunks)
        assert tokens <= self.burst_tokens
        self.seen["large"] += tokens > BUDGET
        scheduled = [chunk.sequence for chunk in batch.chunks]
        assert len(set(scheduled)) == len(scheduled)
        if not batch.chunks:
            # Decodes may wait for the tokens in flight, to guess what follows them: all of them.
            self.seen["waits"] += bool(decoding)
            return
        stood_back = bool(
            batch.prefills and not (batch.decodes or batch.drafts or batch.preemptions) and decoding
        )
        self.in_a_row = self.in_a_row + 1 if stood_back else 0
        self.seen["stood back"] += stood_back
        assert self.in_a_row <= self.burst_steps
        for each in [] if stood_back else decoding:
            # One that was preempted may be back at once, if others hold what it needs.
            assert (each in scheduled) == (each.state is not SequenceState.WAITING)
        for chunk in batch.chunks:
            assert chunk.start == chunk.sequence.computed
            assert chunk.count > 0
            assert chunk.samples == (chunk.end == chunk.sequence.length + len(chunk.guesses))
            assert chunk.sequence.length + len(chunk.guesses) <= chunk.sequence.max_length
            self.seen["guesses"] += len(chunk.guesses)
        # The best-ranked is never a victim, so something always gets on.
        assert running[0].state is not SequenceState.WAITING if running else True
        assert len(set(batch.new_blocks)) == len(batch.new_blocks)
        assert {*batch.new_blocks, *(target for _, target in batch.copies)} <= {
            block for each in scheduled for block in each.blocks
        }

    @invariant()
    def every_block_has_the_holders_that_it_counts(self) -> None:
        held = [block for each in self.scheduler.running for block in each.blocks]
        for block in range(self.blocks.blocks + 1):
            assert self.blocks.references(block) == held.count(block)
        assert PADDING_BLOCK not in held
        assert self.blocks.used == len(set(held))
        assert self.blocks.used + len(self.blocks._free) + len(self.blocks._cached) == self.blocks.blocks

    @invariant()
    def no_known_block_is_out_of_reach(self) -> None:
        keys = self.scheduler._prefixes._keys
        for block, key in keys.items():
            parent = int.from_bytes(key[:4], "little")
            assert parent in {PADDING_BLOCK, *keys}
            assert parent == PADDING_BLOCK or self.blocks.references(parent) >= self.blocks.references(block)
        assert len(self.blocks._cached) == sum(not self.blocks.references(block) for block in keys)
        assert self.scheduler._prefixes._known == {key: block for block, key in keys.items()}
        assert {*self.scheduler._prefixes._begun.values()} <= self.tails()
        assert not any(self.blocks.references(tail) for tail in self.tails())

    @invariant()
    def every_open_sequence_is_in_one_place(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert {*running, *waiting} == set(self.open)
        assert len(running) + len(waiting) == len(self.open)
        assert len(running) <= MAX_RUNNING
        assert [each.rank for each in running] == sorted(each.rank for each in running)
        slots = [each.slot for each in running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(MAX_RUNNING))
        for each in waiting:
            assert (each.state, each.blocks, each.computed) == (SequenceState.WAITING, [], 0)
            assert each.slot is None

    def teardown(self) -> None:
        # Everyone comes to an end, in fewer steps than if each ran alone and was preempted by all others.
        bound = 2 * sum(each.max_length for each in self.open) * (len(self.open) + 1) if self.arrivals else 0
        for _ in range(bound):
            if not self.open:
                break
            self.step()
        assert not self.open
        assert self.blocks.used == 0
        texts = self.device.texts.items()
        for each, text in texts:
            for place in range(len(each.request.prompt_ids), len(text)):
                assert text[place] == next_token(text[:place])


def test_every_history_keeps_the_rules() -> None:
    SchedulerModel.seen.clear()
    run_state_machine_as_test(
        SchedulerModel, settings=hypothesis_settings(max_examples=400, stateful_step_count=25)
    )
    # The histories would prove little if the cache were never too small, nor anything ever shared.
    assert SchedulerModel.seen["steps"] > 1000
    assert SchedulerModel.seen["preemptions"] > 20
    assert SchedulerModel.seen["large"] > 20
    assert SchedulerModel.seen["found"] > 100
    assert SchedulerModel.seen["stood back"] > 10
    assert SchedulerModel.seen["guesses"] > 1000
    assert SchedulerModel.seen["waits"] > 100
    assert SchedulerModel.seen["copies"] > 10
    assert SchedulerModel.seen["taken"] > 100
