from collections import Counter

import pytest

from tests.triton_models.engine.test_scheduler import BUDGET, compute, scheduler, sequence
from triton_models.engine.bursts import BurstAllowance, ends_of_a_burst
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import Sequence


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


def test_decodes_stand_back_for_a_burst_and_its_rest() -> None:
    chosen = decoding(burst_steps=8)
    burst(chosen, 7)
    assert pattern(chosen, 6) == "PPPPDD"


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


def test_steps_are_larger_while_several_prompts_wait_that_fill_them() -> None:
    chosen = decoding(burst_steps=0, burst_tokens=20)
    burst(chosen, 7)
    # Of its 35 tokens, those that are left after one large step would not fill another.
    assert tokens(chosen, 4) == [(19, 1), (9, 1), (7, 1), (0, 1)]


def test_decodes_stand_back_from_large_steps_too() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=20)
    burst(chosen, 7)
    assert tokens(chosen, 3) == [(20, 0), (15, 0), (0, 1)]


def test_an_idle_engine_takes_large_steps() -> None:
    chosen, _ = scheduler(blocks=200, max_running=60, burst_tokens=20)
    burst(chosen, 4)
    assert tokens(chosen, 1) == [(20, 0)]


def test_one_long_prompt_makes_no_step_larger() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=20)
    burst(chosen, 1, prompt=60)
    assert tokens(chosen, 2) == [(BUDGET - 1, 1)] * 2


def test_less_urgent_prompts_make_no_step_larger() -> None:
    chosen = decoding(burst_steps=8, burst_tokens=20, priority=-1)
    burst(chosen, 7)
    assert tokens(chosen, 2) == [(BUDGET - 1, 1)] * 2


@pytest.mark.parametrize(("tokens", "ends"), [(8, 2), (1024, 2), (2048, 4), (4096, 8)])
def test_a_burst_is_of_short_prompts(tokens: int, ends: int) -> None:
    assert ends_of_a_burst(tokens) == ends


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
            allowance.stood_back()
        else:
            allowance.went_on()
    assert done[True] == pytest.approx(100, abs=most + 1)


def test_what_was_used_comes_back() -> None:
    allowance = BurstAllowance(2)

    def used_at_once() -> int:
        count = 0
        while allowance.left:
            allowance.stood_back()
            count += 1
        allowance.went_on()
        return count

    assert [used_at_once() for _ in range(6)] == [2, 2, 2, 2, 0, 0]
    for _ in range(8 * 32):
        allowance.went_on()
    assert [used_at_once() for _ in range(6)] == [2, 2, 2, 2, 0, 0]


def test_clients_that_ask_together_after_every_answer_can_pause_each_time() -> None:
    # 128 prompts of 259 tokens take some 8 steps of 4,096; their answers of 256 tokens, as many steps.
    allowance = BurstAllowance(4)
    for _ in range(20):
        for _ in range(2):
            for _ in range(4):
                assert allowance.left
                allowance.stood_back()
            allowance.went_on()
        for _ in range(256):
            allowance.went_on()
