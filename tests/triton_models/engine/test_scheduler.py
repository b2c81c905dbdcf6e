import pytest

from tests.triton_models.engine.fake_model import request
from triton_models.engine.batch import Batch
from triton_models.engine.block_manager import BlockManager
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import Sequence, SequenceState

BLOCKS, BLOCK_SIZE, MAX_RUNNING, BUDGET = 12, 4, 4, 10


def sequence(name: str, prompt: int, count: int, *, priority: int = 0, arrival: int = 0) -> Sequence:
    """A sequence whose prompt begins like no other's."""
    ask = request(name, [arrival] * prompt, SamplingParams(max_tokens=count), priority=priority)
    return Sequence(ask, arrival=arrival, arrived_at=0.0, max_tokens=count)


def scheduler(
    *, blocks: int = BLOCKS, max_running: int = MAX_RUNNING, budget: int = BUDGET, **bursts: int
) -> tuple[Scheduler, BlockManager]:
    manager = BlockManager(blocks, BLOCK_SIZE)
    chosen = Scheduler(manager, max_running=max_running, max_batched_tokens=budget, **bursts)
    return chosen, manager


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
    # It finds its own blocks again.
    batch = chosen.schedule()
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in batch.chunks] == [(8, 1, True)]


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
