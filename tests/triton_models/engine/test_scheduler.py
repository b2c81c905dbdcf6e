from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.triton_models.engine.fake_model import request
from triton_models.engine.blocks import BlockManager
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.scheduler import BurstAllowance, Scheduler, WaitingList, least_ends
from triton_models.engine.sequence import PRIORITY_S, Sequence, SequenceState
from triton_models.engine.step import Step
from triton_models.engine.step_times import StepTimes

BLOCKS, BLOCK_SIZE, MAX_RUNNING, BUDGET = 12, 4, 4, 10


def sequence(name: str, prompt: int, count: int, *, priority: int = 0, arrival: int = 0) -> Sequence:
    """A sequence whose prompt begins like no other's."""
    ask = request(name, [arrival] * prompt, SamplingParams(max_tokens=count), priority=priority)
    return Sequence(ask, arrival=arrival, arrived_at=0.0, max_tokens=count)


def scheduler(
    *,
    blocks: int = BLOCKS,
    max_running: int = MAX_RUNNING,
    budget: int = BUDGET,
    burst_steps: int = 0,
    burst_tokens: int = 0,
    times: StepTimes | None = None,
) -> tuple[Scheduler, BlockManager]:
    manager = BlockManager(blocks, BLOCK_SIZE)
    settings = SimpleNamespace(
        max_running=max_running,
        max_batched_tokens=budget,
        largest_step=max(budget, burst_tokens),
        burst_steps=burst_steps,
        draft_tokens=0,
    )
    return Scheduler(manager, settings, None, times), manager


def compute(chosen: Scheduler, batch: Step) -> list[Sequence]:
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


def step_until_preemption(chosen: Scheduler) -> Step:
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
    assert len(manager._free) == 3
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


def names(batch: Step) -> list[str]:
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


def test_prompts_are_cut_where_a_row_takes_least_time() -> None:
    # 8 rows take 1 ms each, and 10 rows 2 ms.
    chosen, _ = scheduler(blocks=40, times=StepTimes((4, 8, 10), (0.008, 0.008, 0.020)))
    for number in range(3):
        chosen.add(sequence(str(number), 1, 9, arrival=number))
    compute(chosen, chosen.schedule())
    long = sequence("long", 12, 1, arrival=4)
    chosen.add(long)
    assert [chunk.count for chunk in chosen.schedule().chunks] == [1, 1, 1, 5]


def test_a_prompt_whose_end_fits_is_cut_for_many_decodes_only() -> None:
    times = StepTimes((6, 10), (0.006, 0.011))
    counted = []
    for decodes in (1, 3):
        chosen, _ = scheduler(blocks=40, times=times)
        for number in range(decodes):
            chosen.add(sequence(str(number), 1, 9, arrival=number))
        compute(chosen, chosen.schedule())
        chosen.add(sequence("new", 9 - decodes - 2, 1, arrival=9))
        counted.append(chosen.schedule().prefills[0].count)
    assert counted == [6, 3], "all of it beside one decode; beside three, what makes six rows"


def test_a_burst_is_as_large_as_it_may_be() -> None:
    times = StepTimes((8, 14), (0.008, 0.028))
    chosen, _ = scheduler(blocks=80, max_running=14, burst_tokens=14, times=times)
    for number in range(14):
        chosen.add(sequence(str(number), 6, 9, arrival=number))
    assert sum(chunk.count for chunk in chosen.schedule().chunks) == 14


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


def burst(chosen: Scheduler, count: int, *, prompt: int = 5, priority: int = 0) -> list[Sequence]:
    several = [
        sequence(f"burst{number}", prompt, 1, arrival=100 + number, priority=priority)
        for number in range(count)
    ]
    for each in several:
        chosen.add(each)
    return several


def decoding(
    *, burst_steps: int, burst_tokens: int = BUDGET, count: int = 90, prompt: int = 2, priority: int = 0
) -> Scheduler:
    """A scheduler whose only sequence is in the middle of its answer; a step holds two prompts of 5."""
    chosen, _ = scheduler(blocks=200, max_running=60, burst_steps=burst_steps, burst_tokens=burst_tokens)
    chosen.add(sequence("decoding", prompt, count, priority=priority))
    compute(chosen, chosen.schedule())
    return chosen


def pattern(chosen: Scheduler, steps: int) -> str:
    """What the steps do: P prompts alone, M prompts beside decodes, D decodes alone."""
    done = ""
    for _ in range(steps):
        batch = chosen.schedule()
        done += "M" if batch.prefills and batch.decodes else "P" if batch.prefills else "D"
        compute(chosen, batch)
    return done


def test_decodes_pause_for_a_burst_and_its_rest() -> None:
    chosen = decoding(burst_steps=8)
    burst(chosen, 13)
    assert pattern(chosen, 9) == "PPPPPPPDD"


def test_without_burst_steps_every_decode_is_in_every_step() -> None:
    chosen = decoding(burst_steps=0)
    burst(chosen, 7)
    assert pattern(chosen, 5) == "MMMMD"


def test_no_more_steps_in_a_row_than_allowed() -> None:
    chosen = decoding(burst_steps=2)
    burst(chosen, 12)
    assert pattern(chosen, 8) == "PPMPPMMD"


def test_one_long_prompt_is_no_burst() -> None:
    chosen = decoding(burst_steps=8)
    burst(chosen, 1, prompt=40)
    assert set(pattern(chosen, 4)) == {"M"}


def test_requests_that_go_on_for_others_are_no_burst() -> None:
    """Nearly all of their tokens are cached, which the estimate does not know."""
    chosen = decoding(burst_steps=8)
    for each in burst(chosen, 7):
        each.request = replace(each.request, since=0.0)
    assert set(pattern(chosen, 4)) == {"M"}


def test_a_more_important_answer_is_not_held_up() -> None:
    chosen = decoding(burst_steps=8, priority=-1)
    burst(chosen, 7)
    assert set(pattern(chosen, 3)) == {"M"}


def test_a_more_important_answer_is_not_held_up_beside_one_that_waited_longer() -> None:
    chosen, _ = scheduler(blocks=200, max_running=60, burst_steps=8)
    job = sequence("job", 2, 90, priority=5)
    chat = sequence("chat", 2, 90, arrival=1)
    job.rank, chat.rank = (0.0, 0), (1.0, 1)
    for each in (job, chat):
        chosen.add(each)
    compute(chosen, chosen.schedule())
    burst(chosen, 7, priority=5)
    assert set(pattern(chosen, 3)) == {"M"}


def test_prompts_that_cannot_be_admitted_hold_nothing_up() -> None:
    chosen, _ = scheduler(blocks=200, max_running=1, burst_steps=8)
    chosen.add(sequence("decoding", 2, 90))
    compute(chosen, chosen.schedule())
    burst(chosen, 7)
    assert set(pattern(chosen, 3)) == {"D"}


def tokens(chosen: Scheduler, steps: int) -> list[tuple[int, int]]:
    """The tokens of prompts and of decodes in each step."""
    done = []
    for _ in range(steps):
        batch = chosen.schedule()
        done.append((sum(chunk.count for chunk in batch.prefills), len(batch.decodes)))
        compute(chosen, batch)
    return done


def test_steps_are_large_from_when_six_of_them_wait_until_none_is_full() -> None:
    chosen = decoding(burst_steps=0, burst_tokens=20)
    burst(chosen, 23)
    assert tokens(chosen, 1) == [(9, 1)]
    chosen = decoding(burst_steps=0, burst_tokens=20)
    burst(chosen, 24)
    assert tokens(chosen, 8) == [*[(19, 1)] * 6, (6, 1), (0, 1)]


def test_what_is_cached_makes_no_step_larger() -> None:
    chosen, _ = scheduler(blocks=400, max_running=60, burst_tokens=20)
    for first in (20, 10):
        for number in range(12):
            chosen.add(sequence(str(number), 10, 1, arrival=number))
        assert tokens(chosen, 1) == [(first, 0)], "of ten tokens, eight are cached the second time"
        tokens(chosen, 8)


def test_less_urgent_prompts_behind_a_burst_are_not_counted() -> None:
    for priority, first in ((0, (39, 1)), (1, (9, 1))):
        chosen = decoding(burst_steps=0, burst_tokens=40)
        burst(chosen, 5)
        for number in range(44):
            chosen.add(sequence(f"later{number}", 5, 1, arrival=200 + number, priority=priority))
        assert tokens(chosen, 1) == [first]


def test_decodes_pause_from_large_steps_too() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=20)
    burst(chosen, 25)
    assert tokens(chosen, 8) == [*[(20, 0)] * 6, (5, 0), (0, 1)]


def test_decodes_do_not_pause_for_fewer_than_six_large_steps() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=20)
    burst(chosen, 23)
    assert tokens(chosen, 3) == [(9, 1)] * 3


def test_an_idle_engine_takes_large_steps() -> None:
    chosen, _ = scheduler(blocks=200, max_running=60, burst_tokens=40)
    burst(chosen, 48)
    assert tokens(chosen, 1) == [(40, 0)]


def test_one_long_prompt_makes_no_step_larger() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=40)
    burst(chosen, 1, prompt=60)
    assert tokens(chosen, 2) == [(BUDGET - 1, 1)] * 2


def test_less_urgent_prompts_make_no_step_larger() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=40, priority=-1)
    burst(chosen, 7)
    assert tokens(chosen, 2) == [(BUDGET - 1, 1)] * 2


@pytest.mark.parametrize(("tokens", "ends"), [(8, 2), (1024, 2), (2048, 4), (4096, 8)])
def test_a_burst_is_of_short_prompts(tokens: int, ends: int) -> None:
    assert least_ends(tokens) == ends


@pytest.mark.parametrize("most", [1, 2, 8])
def test_lasting_load_leaves_out_one_step_in_33(most: int) -> None:
    allowance = BurstAllowance(most)
    done: Counter[bool] = Counter()
    until_used = 16 * most
    for step in range(3300 + until_used):
        left = allowance.left
        if step >= until_used:
            done[left] += 1
        if left:
            allowance.paused()
        else:
            allowance.resumed()
    assert done[True] == pytest.approx(100, abs=most + 1)


def test_what_was_used_comes_back() -> None:
    allowance = BurstAllowance(2)

    def used_at_once() -> int:
        count = 0
        while allowance.left:
            allowance.paused()
            count += 1
        allowance.resumed()
        return count

    assert [used_at_once() for _ in range(6)] == [2, 2, 2, 2, 0, 0]
    for _ in range(8 * 32):
        allowance.resumed()
    assert [used_at_once() for _ in range(6)] == [2, 2, 2, 2, 0, 0]


def test_clients_that_ask_together_after_every_answer_can_pause_each_time() -> None:
    # Of the 16 steps of 2,048 that 128 prompts of 259 tokens take, half; their answers take 256 steps.
    allowance = BurstAllowance(4)
    for _ in range(20):
        for _ in range(2):
            for _ in range(4):
                assert allowance.left
                allowance.paused()
            allowance.resumed()
        for _ in range(256):
            allowance.resumed()


def waiting_one(
    arrival: int, *, priority: int = 0, deadline: float | None = None, arrived_at: float = 0.0
) -> Sequence:
    asks = request(f"r{arrival}", priority=priority, deadline=deadline)
    return Sequence(asks, arrival=arrival, arrived_at=arrived_at, max_tokens=1)


def drain(waiting: WaitingList) -> list[int]:
    order = []
    while (first := waiting.first()) is not None:
        waiting.remove(first)
        order.append(first.arrival)
    return order


@given(st.lists(st.integers(-2, 2), max_size=20), st.data())
def test_order_is_priority_then_arrival_whatever_is_removed(
    priorities: list[int], data: st.DataObject
) -> None:
    waiting = WaitingList()
    all_of_them = [waiting_one(number, priority=priority) for number, priority in enumerate(priorities)]
    for each in data.draw(st.permutations(all_of_them)):
        waiting.add(each)
    gone = data.draw(st.sets(st.integers(0, 19), max_size=5))
    for arrival in gone:
        if arrival < len(all_of_them):
            waiting.remove(all_of_them[arrival])
    kept = [each for each in all_of_them if each.arrival not in gone]
    assert len(waiting) == len(kept)
    assert drain(waiting) == [each.arrival for each in sorted(kept, key=lambda each: each.rank)]


def test_a_preempted_sequence_is_first_of_its_priority_again() -> None:
    waiting = WaitingList()
    for each in (waiting_one(5), waiting_one(6), waiting_one(7, priority=-1)):
        waiting.add(each)
    waiting.add(waiting_one(2))
    assert drain(waiting) == [7, 2, 5, 6]


def test_who_waits_long_enough_overtakes_the_more_urgent_that_come_later() -> None:
    waiting = WaitingList()
    waiting.add(waiting_one(0, priority=2, arrived_at=100.0))
    for arrival, arrived_at in enumerate((100.0, 100.0 + PRIORITY_S, 99.0 + 2 * PRIORITY_S), 1):
        waiting.add(waiting_one(arrival, arrived_at=arrived_at))
    waiting.add(waiting_one(4, arrived_at=101.0 + 2 * PRIORITY_S))
    assert drain(waiting) == [1, 2, 3, 0, 4]


def test_expired_names_exactly_those_whose_time_is_over() -> None:
    waiting = WaitingList()
    several = [
        waiting_one(arrival, deadline=deadline) for arrival, deadline in enumerate([10.0, None, 5.0, 7.0])
    ]
    for each in several:
        waiting.add(each)
    assert waiting.expired(4.9) == []
    assert [each.arrival for each in waiting.expired(7.0)] == [2, 3]
    waiting.remove(several[2])
    waiting.remove(several[3])
    assert waiting.expired(9.9) == []
    waiting.add(waiting_one(9, deadline=9.0))
    assert [each.arrival for each in waiting.expired(10.0)] == [0, 9]


def test_what_expired_is_named_until_it_is_removed() -> None:
    waiting = WaitingList()
    waiting.add(waiting_one(1, deadline=1.0))
    assert [each.arrival for each in waiting.expired(2.0)] == [1]
    assert [each.arrival for each in waiting.expired(2.0)] == [1]
