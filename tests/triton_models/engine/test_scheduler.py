import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from tests.triton_models.engine.fake_model import request
from triton_models.engine.batch import Batch
from triton_models.engine.block_manager import PADDING_BLOCK, BlockManager
from triton_models.engine.sampling import SamplingParams, TokenMask
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import Sequence, SequenceState

BLOCKS, BLOCK_SIZE, MAX_RUNNING, BUDGET = 12, 4, 4, 10
CONTEXT = BLOCKS * BLOCK_SIZE


class Anything:
    """A mask; what it says is never asked here."""

    def fill(self, words: Tensor) -> None:
        raise NotImplementedError

    def accept(self, token_id: int) -> None:
        raise NotImplementedError


def sequence(
    name: str, prompt: int, count: int, *, priority: int = 0, arrival: int = 0, mask: TokenMask | None = None
) -> Sequence:
    ask = request(name, [1] * prompt, SamplingParams(max_tokens=count, mask=mask), priority=priority)
    return Sequence(ask, arrival=arrival, arrived_at=0.0, max_tokens=count)


def scheduler(
    *, blocks: int = BLOCKS, max_running: int = MAX_RUNNING, budget: int = BUDGET
) -> tuple[Scheduler, BlockManager]:
    manager = BlockManager(blocks, BLOCK_SIZE)
    return Scheduler(manager, max_running=max_running, max_batched_tokens=budget), manager


def compute(chosen: Scheduler, batch: Batch) -> list[Sequence]:
    """Do what the engine does with a batch; returns the sequences that finished."""
    finished = []
    batch.advance()
    for chunk in batch.chunks:
        if not chunk.samples:
            continue
        each = chunk.sequence
        each.append(7)
        if each.generated >= each.max_tokens:
            chosen.remove(each)
            each.move_to(SequenceState.FINISHED)
            finished.append(each)
    return finished


class SchedulerModel(RuleBasedStateMachine):
    """Random arrivals, cancels and steps over a cache that is far too small."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.blocks = scheduler()
        self.open: dict[str, Sequence] = {}
        self.arrivals = 0

    @rule(data=st.data(), prompt=st.integers(1, CONTEXT - 1), priority=st.integers(-1, 1))
    def add(self, data: st.DataObject, prompt: int, priority: int) -> None:
        count = data.draw(st.integers(1, CONTEXT - prompt))
        new = sequence(f"{self.arrivals}", prompt, count, priority=priority, arrival=self.arrivals)
        self.arrivals += 1
        self.open[new.request.request_id] = new
        self.scheduler.add(new)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gone = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.scheduler.remove(gone)
        gone.move_to(SequenceState.FINISHED)
        assert gone.blocks == []

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.step_once()

    def step_once(self) -> None:
        decoding = [each for each in self.scheduler.running if each.state is SequenceState.DECODE]
        batch = self.scheduler.schedule()
        assert bool(batch.chunks) == bool(self.open)
        assert sum(chunk.count for chunk in batch.chunks) <= BUDGET
        scheduled = [chunk.sequence for chunk in batch.chunks]
        assert len(set(map(id, scheduled))) == len(scheduled)
        for each in decoding:
            assert (each in scheduled) == (each.state is SequenceState.DECODE)
        if decoding:
            assert min(decoding, key=lambda each: each.rank) in scheduled
        for chunk in batch.chunks:
            assert chunk.start == chunk.sequence.computed
            assert chunk.count > 0
            assert len(chunk.sequence.blocks) >= self.blocks.blocks_for(chunk.end)
        assert len(set(batch.new_blocks)) == len(batch.new_blocks)
        held = {block for each in scheduled for block in each.blocks}
        assert set(batch.new_blocks) <= held
        for each in compute(self.scheduler, batch):
            del self.open[each.request.request_id]

    @invariant()
    def every_block_has_the_holder_that_it_counts(self) -> None:
        held = [block for each in self.scheduler.running for block in each.blocks]
        assert PADDING_BLOCK not in held
        assert len(set(held)) == len(held) == self.blocks.used
        assert self.blocks.used + self.blocks.free == BLOCKS
        assert all(self.blocks.references(block) == 1 for block in held)
        assert sum(self.blocks.references(block) for block in range(BLOCKS + 1)) == len(held)

    @invariant()
    def every_open_sequence_is_in_one_place(self) -> None:
        running = {each.request.request_id for each in self.scheduler.running}
        waiting = {each.request.request_id for each in self.scheduler.waiting.members()}
        assert running | waiting == set(self.open)
        assert not running & waiting
        assert len(running) == len(self.scheduler.running) <= MAX_RUNNING
        ranks = [each.rank for each in self.scheduler.running]
        assert ranks == sorted(ranks)
        for each in self.scheduler.waiting.members():
            assert (each.state, each.blocks, each.computed) == (SequenceState.WAITING, [], 0)

    def teardown(self) -> None:
        # Everyone comes to an end, in fewer steps than if each ran alone and was preempted by all others.
        bound = sum(len(each.tokens) + each.max_tokens for each in self.open.values()) * (len(self.open) + 1)
        for _ in range(bound):
            if not self.open:
                break
            self.step_once()
        assert not self.open
        assert self.blocks.used == 0


TestSchedulerModel = SchedulerModel.TestCase
TestSchedulerModel.settings = hypothesis_settings(max_examples=60, stateful_step_count=25)


def test_the_model_check_preempts() -> None:
    """The state machine would prove little if its cache were never too small."""
    chosen, _ = scheduler()
    for number in range(4):
        chosen.add(sequence(str(number), 6, 20, arrival=number))
    preemptions = 0
    for _ in range(200):
        batch = chosen.schedule()
        preemptions += batch.preemptions
        compute(chosen, batch)
    assert preemptions > 0
    assert not chosen.running


def step_until_preemption(chosen: Scheduler) -> Batch:
    for _ in range(50):
        batch = chosen.schedule()
        if batch.preemptions:
            return batch
        compute(chosen, batch)
    raise AssertionError("nothing was preempted")


def test_the_worst_ranked_gives_up_its_blocks_and_comes_back_first() -> None:
    chosen, manager = scheduler(blocks=4, max_running=3)
    important = sequence("important", 3, 9, priority=-1, arrival=2)
    older = sequence("older", 4, 9, arrival=0)
    for each in (important, older):
        chosen.add(each)
    compute(chosen, chosen.schedule())
    chosen.add(sequence("younger", 4, 1, arrival=3))
    step_until_preemption(chosen)
    assert important.state is SequenceState.DECODE
    assert older.state is SequenceState.WAITING
    assert chosen.waiting.first() is older
    assert older.generated > 0
    assert manager.used == len(important.blocks)


def test_what_was_preempted_is_not_admitted_in_the_same_step() -> None:
    chosen, _ = scheduler(blocks=4, max_running=3)
    chosen.add(sequence("a", 3, 9, arrival=0))
    chosen.add(sequence("b", 4, 9, arrival=1))
    batch = step_until_preemption(chosen)
    assert [chunk.sequence.request.request_id for chunk in batch.chunks] == ["a"]


def test_a_new_sequence_leaves_a_block_for_each_running_one() -> None:
    chosen, manager = scheduler(blocks=4)
    chosen.add(sequence("a", 3, 9, arrival=0))
    compute(chosen, chosen.schedule())
    chosen.add(sequence("b", 12, 1, arrival=1))
    assert manager.free == 3
    assert [chunk.sequence.request.request_id for chunk in chosen.schedule().chunks] == ["a"]


def test_no_more_than_max_running_at_once() -> None:
    chosen, _ = scheduler(max_running=2)
    for number in range(3):
        chosen.add(sequence(str(number), 1, 5, arrival=number))
    assert len(chosen.schedule().chunks) == 2
    assert len(chosen.waiting) == 1


@pytest.mark.parametrize("state", [SequenceState.PREFILL, SequenceState.DECODE])
def test_removing_a_running_sequence_frees_its_blocks(state: SequenceState) -> None:
    chosen, manager = scheduler()
    each = sequence("a", 15 if state is SequenceState.PREFILL else 3, 5)
    chosen.add(each)
    compute(chosen, chosen.schedule())
    assert each.state is state
    chosen.remove(each)
    assert manager.used == 0
    assert not chosen.running


def names(batch: Batch) -> list[str]:
    return [chunk.sequence.request.request_id for chunk in batch.chunks]


def test_a_step_is_scheduled_while_the_tokens_before_are_in_flight() -> None:
    chosen, _ = scheduler()
    each = sequence("a", 3, 5)
    chosen.add(each)
    first = chosen.schedule()
    first.advance()
    assert (each.in_flight, each.length, each.computed, each.state) == (1, 4, 3, SequenceState.DECODE)
    second = chosen.schedule()
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in second.chunks] == [(3, 1, True)]
    second.advance()
    each.append(7)
    assert (each.in_flight, each.length, each.tokens[3:]) == (1, 5, [7])
    # What was true when the chunk was made stays true.
    assert first.prefills[0].samples


def test_no_step_beyond_the_last_token_even_before_its_value_is_known() -> None:
    chosen, _ = scheduler()
    each = sequence("a", 3, 2)
    chosen.add(each)
    chosen.schedule().advance()
    chosen.schedule().advance()
    each.append(7)
    assert (each.generated, each.in_flight) == (1, 1)
    assert names(chosen.schedule()) == []


def test_a_masked_sequence_waits_for_its_newest_token() -> None:
    chosen, _ = scheduler()
    masked = sequence("masked", 3, 5, arrival=0, mask=Anything())
    for each in (masked, sequence("free", 3, 5, arrival=1)):
        chosen.add(each)
    chosen.schedule().advance()
    assert names(chosen.schedule()) == ["free"]
    masked.append(7)
    assert names(chosen.schedule()) == ["masked", "free"]


def test_a_preempted_sequence_waits_for_the_token_it_has_in_flight() -> None:
    chosen, _ = scheduler(blocks=5, budget=15)
    older, younger = sequence("older", 8, 8, arrival=0), sequence("younger", 7, 8, arrival=1)
    for each in (older, younger):
        chosen.add(each)
    chosen.schedule().advance()
    chosen.schedule().advance()
    for each in (older, younger):
        each.append(7)
    assert names(chosen.schedule()) == ["older"]
    assert (younger.state, younger.in_flight) == (SequenceState.WAITING, 1)
    chosen.remove(older)
    assert names(chosen.schedule()) == []
    younger.append(7)
    batch = chosen.schedule()
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in batch.chunks] == [(0, 9, True)]


def test_slots_are_the_lowest_free_and_come_back() -> None:
    chosen, _ = scheduler(max_running=3)
    members = [sequence(str(number), 1, 5, arrival=number) for number in range(4)]
    for each in members:
        chosen.add(each)
    compute(chosen, chosen.schedule())
    assert [each.slot for each in members] == [0, 1, 2, None]
    chosen.remove(members[1])
    compute(chosen, chosen.schedule())
    assert [each.slot for each in members] == [0, None, 2, 1]
