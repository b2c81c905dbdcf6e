import struct
from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from triton_models.engine.blocks import BlockManager
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.scheduler import Scheduler
from triton_models.engine.sequence import Request, Sequence, SequenceState
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Step

SIZE = 4


class Table:
    """A scheduler and its sequences; every step samples what `answer` says."""

    def __init__(
        self,
        *,
        blocks: int = 40,
        max_running: int = 8,
        budget: int = 40,
        answer: int = 9,
    ) -> None:
        self.blocks = BlockManager(blocks, SIZE)
        self.scheduler = Scheduler(
            self.blocks,
            EngineSettings(max_running=max_running, max_batched_tokens=budget),
        )
        self.answer = answer
        self.arrivals = 0

    def add(
        self,
        prompt: Tokens[int],
        *,
        count: int = 4,
        priority: int = 0,
        shares: bool = True,
        tail: bool = False,
    ) -> Sequence:
        request = Request(
            request_id=str(self.arrivals),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=count),
            priority=priority,
            prefix_cache=shares,
            shares_tail=tail,
        )
        sequence = Sequence(request, arrival=self.arrivals, arrived_at=0.0, max_tokens=count)
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        batch = self.scheduler.schedule()
        batch.advance()
        for chunk in batch.chunks:
            if chunk.samples:
                chunk.sequence.append(self.answer)
                if chunk.sequence.generated >= chunk.sequence.max_tokens:
                    self.end(chunk.sequence)
        return batch

    def end(self, sequence: Sequence, *, invalid: bool = False) -> None:
        self.scheduler.remove(sequence, invalid=invalid)
        sequence.move_to(SequenceState.FINISHED)

    def finish(self, sequence: Sequence) -> None:
        while sequence.state is not SequenceState.FINISHED:
            self.step()


def work(batch: Step) -> dict[str, tuple[int, int]]:
    """Start and end of what each sequence computes of its prompt."""
    return {chunk.sequence.request.request_id: (chunk.start, chunk.end) for chunk in batch.prefills}


def test_a_later_prompt_computes_only_what_differs() -> None:
    table = Table()
    first = table.add(range(14))
    table.finish(first)
    second = table.add([*range(10), 50, 51, 52, 53])
    assert work(table.step()) == {"1": (8, 14)}
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_two_running_sequences_share_blocks_and_each_holds_them() -> None:
    table = Table()
    first, second = table.add(range(9)), table.add(range(9))
    table.step()
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert [table.blocks.references(block) for block in first.blocks] == [2, 2, 1]
    table.end(first)
    assert [table.blocks.references(block) for block in second.blocks] == [1, 1, 1]
    assert table.blocks.used == 3


def test_at_least_the_last_prompt_token_is_computed() -> None:
    table = Table()
    table.finish(table.add(range(8)))
    second = table.add(range(8))
    assert work(table.step()) == {"1": (4, 8)}
    assert second.cached_tokens == 4


def test_clients_that_arrive_together_compute_a_common_prompt_once() -> None:
    table = Table(blocks=200, max_running=32, budget=64)
    members = [table.add([*range(150), 1000 + number]) for number in range(32)]
    computed = 0
    while any(each.state in {SequenceState.WAITING, SequenceState.PREFILL} for each in members):
        batch = table.step()
        computed += sum(chunk.count for chunk in batch.prefills)
    # 37 full blocks are common; each but the first has 3 tokens of its own prompt left.
    assert computed == 151 + 31 * 3
    assert [each.cached_tokens for each in members] == [0] + [148] * 31


def test_siblings_share_the_prompt_and_write_only_their_own_blocks() -> None:
    table = Table()
    siblings = [table.add(range(10), count=6) for _ in range(3)]
    assert work(table.step()) == {"0": (0, 10), "1": (8, 10), "2": (8, 10)}
    assert table.blocks.used == 2 + 3
    for _ in range(4):
        table.step()
    tails = [set(each.blocks[2:]) for each in siblings]
    assert len(set.union(*tails)) == sum(map(len, tails)) == 6
    for each in siblings:
        table.finish(each)
    assert table.blocks.used == 0


def test_the_next_turn_finds_the_answer_of_the_turn_before() -> None:
    table = Table()
    first = table.add(range(6), count=7)
    table.finish(first)
    second = table.add([*range(6), *[9] * 7, 1, 2, 3])
    table.step()
    # The seventh token of the answer was never computed: 12 tokens are there, 3 blocks.
    assert second.cached_tokens == 12


def test_an_answer_is_found_while_it_goes_on() -> None:
    table = Table()
    table.add(range(6), count=12)
    for _ in range(8):
        table.step()
    second = table.add([*range(6), *[9] * 9])
    table.step()
    assert second.cached_tokens == 12


def test_a_token_in_flight_registers_nothing() -> None:
    table = Table()
    first = table.add(range(6), count=7)
    table.scheduler.schedule().advance()
    first.append(9)
    table.scheduler.schedule().advance()
    table.scheduler.schedule().advance()
    # 8 tokens will be in the cache, and of these the last is not known.
    assert (first.computed, len(first.tokens)) == (8, 7)
    table.end(first)
    second = table.add([*range(6), 9, 9, 9])
    table.step()
    assert second.cached_tokens == 7


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_a_request_may_keep_out(*, first: bool, second: bool) -> None:
    table = Table()
    table.finish(table.add(range(9), shares=first))
    table.add(range(9), shares=second)
    assert work(table.step()) == {"1": (0, 9)}


def test_what_is_found_is_not_cleared() -> None:
    table = Table()
    table.finish(table.add(range(9)))
    second = table.add(range(9))
    assert table.step().new_blocks == second.blocks[2:]


def test_the_same_tokens_behind_others_are_not_the_same() -> None:
    table = Table()
    table.finish(table.add([1, 1, 1, 1, 2, 2, 2, 2, 5]))
    table.finish(table.add([3, 3, 3, 3, 2, 2, 2, 2, 5]))
    for number, prompt in enumerate(([2, 2, 2, 2, 5], [3, 3, 3, 3, 1, 1, 1, 1, 5]), 2):
        table.add(prompt)
        assert work(table.step())[str(number)] == (0 if number == 2 else 4, len(prompt))


class Colliding(bytes):
    """A key whose hash is every other's."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1


class CollidingKeys:
    """Packs keys of one hash."""

    def __init__(self, key: struct.Struct) -> None:
        self.key = key

    def pack(self, *parts: int) -> bytes:
        return Colliding(self.key.pack(*parts))


def test_a_hash_collision_finds_nothing() -> None:
    table = Table()
    prefixes: Any = table.scheduler._prefixes
    prefixes._key = CollidingKeys(prefixes._key)
    table.finish(table.add(range(9)))
    table.add(range(20, 29))
    table.add(range(9))
    assert work(table.step()) == {"1": (0, 9), "2": (8, 9)}


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    table = Table(blocks=6)
    table.add([1] * 8, count=9)
    younger = table.add([2] * 8, count=6)
    while not table.step().preemptions:
        pass
    while younger.state is SequenceState.WAITING:
        batch = table.step()
    start, _ = work(batch)["1"]
    assert start > 0
    assert younger.cached_tokens == 0


@pytest.mark.parametrize(("token", "found"), [(1, 12), (2, 4), (3, 8)])
def test_blocks_are_evicted_from_the_end_of_the_text_that_rested_longest(token: int, found: int) -> None:
    table = Table(blocks=8)
    table.finish(table.add([1] * 13, count=1))
    table.finish(table.add([2] * 13, count=1))
    table.finish(table.add([1] * 13, count=1))
    assert (len(table.blocks._cached), len(table.blocks._free)) == (8, 0), "three each, and a tail"
    table.finish(table.add([3] * 9, count=1))
    each = table.add([token] * (9 if token == 3 else 13))
    table.step()
    assert each.cached_tokens == found


def test_who_overtakes_goes_on_from_where_the_first_is() -> None:
    table = Table(budget=8)
    first = table.add(range(30))
    assert work(table.step()) == {"0": (0, 8)}
    second = table.add(range(30), priority=-1)
    assert work(table.step()) == {"1": (8, 16)}
    table.finish(first)
    assert second.state is SequenceState.FINISHED
    assert table.blocks.used == 0


def test_who_goes_on_alone_after_the_other_has_gone() -> None:
    table = Table(budget=8)
    first = table.add(range(30))
    second = table.add(range(30))
    table.step()
    assert second.state is SequenceState.WAITING
    table.end(first)
    assert work(table.step()) == {"1": (8, 16)}


def test_what_was_computed_beside_something_invalid_is_found_by_nobody() -> None:
    table = Table()
    table.finish(table.add([7] * 9))
    table.finish(table.add([8] * 3, tail=True))
    sick, other = table.add(range(9), count=12), table.add([*range(8), 50, 51, 52, 53, 54], count=12)
    table.step()
    table.end(sick, invalid=True)
    assert table.scheduler._prefixes._keys == {}
    table.finish(other)
    assert table.blocks.available == table.blocks.blocks
    for prompt, found in (([*range(8), 50], 0), ([*range(8), 50], 8), ([7] * 9, 0)):
        each = table.add(prompt)
        table.finish(each)
        assert each.cached_tokens == found


def test_what_fills_no_block_is_shared_as_a_tail() -> None:
    table = Table()
    first = table.add(range(11), count=1, tail=True)
    table.finish(first)
    branches = [table.add([*range(11), token], count=1, tail=True) for token in (50, 51)]
    step = table.scheduler.schedule()
    assert work(step) == {"1": (11, 12), "2": (11, 12)}
    ((source, one), (again, other)) = step.copies
    assert source == again not in (one, other)
    assert not step.new_blocks
    assert [each.blocks[-1] for each in branches] == [one, other]
    assert branches[0].blocks[:2] == branches[1].blocks[:2]
    assert table.blocks.references(source) == 0


def test_the_next_turn_takes_the_tail_and_writes_on() -> None:
    table = Table()
    first = table.add(range(8), count=7)
    while first.generated < 6:
        table.step()
    held = list(first.blocks)
    table.finish(first)
    second = table.add([*range(8), *[9] * 7, 1, 2, 3])
    step = table.scheduler.schedule()
    # The seventh token of the answer was never computed.
    assert (work(step), second.cached_tokens) == ({"1": (14, 18)}, 14)
    assert second.blocks[:4] == held
    assert (step.copies, step.new_blocks) == ([], second.blocks[4:])
    assert table.blocks.used == 5


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ([*range(11), 50], 11),
        # The last token may be a stop id.
        ([*range(10), 50, 51], 10),
        ([*range(10), 50], 10),
        # So much can be computed again; who began with all of it would not find it any more.
        ([*range(9), 50, 51], 8),
        (range(10), 8),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_a_tail_is_for_who_begins_with_all_of_it(prompt: Tokens[int], begins: int, *, copied: bool) -> None:
    table = Table()
    table.finish(table.add(range(11), count=1))
    table.add(prompt, tail=copied)
    step = table.step()
    assert work(step) == {"1": (begins, len(prompt))}
    assert len(step.copies) == (copied and begins > 8)


def test_of_two_that_want_one_tail_the_first_gets_it() -> None:
    table = Table()
    table.finish(table.add(range(11), count=1))
    turns = [table.add([*range(11), token]) for token in (50, 51)]
    assert work(table.step()) == {"1": (11, 12), "2": (8, 12)}
    for each in turns:
        table.finish(each)
    # Both left tails: each finds its own.
    for token in (50, 51):
        each = table.add([*range(11), token, *[9] * 4, 1])
        table.finish(each)
        assert each.cached_tokens == 15


def test_the_longest_of_several_tails_is_taken() -> None:
    table = Table()
    for length in (9, 11, 10):
        table.finish(table.add(range(length), count=1, tail=True))
    table.add(range(20))
    assert work(table.step()) == {"3": (11, 20)}


def test_a_tail_is_only_kept_while_there_is_room() -> None:
    table = Table(blocks=3)
    table.finish(table.add(range(3), count=1))
    table.finish(table.add(range(50, 62), count=1))
    assert table.scheduler._prefixes._begun == {}
    table.add(range(4), count=1)
    assert work(table.step()) == {"2": (0, 4)}


def test_many_short_texts_leave_tails() -> None:
    table = Table(blocks=200)
    for token in range(70):
        table.finish(table.add([token, 1, 1], count=1))
    assert table.blocks.available == table.blocks.blocks == len(table.blocks._free) + 70
    for prompt, cached in (([5, 1, 1, 2], 3), ([6, 1, 2, 2], 2), ([7, 2, 2], 0), ([69, 1, 1, 1], 3)):
        each = table.add(prompt, count=1)
        table.finish(each)
        assert each.cached_tokens == cached


class CountedKeys:
    """Counts the blocks that are looked up or registered."""

    def __init__(self, keys: struct.Struct) -> None:
        self.keys = keys
        self.packed = 0

    def pack(self, *numbers: int) -> bytes:
        self.packed += 1
        return self.keys.pack(*numbers)


def test_a_long_conversation_that_waits_for_room_is_not_looked_up_anew_in_each_step() -> None:
    table = Table(blocks=16)
    prefixes: Any = table.scheduler._prefixes
    table.finish(table.add(range(33), count=1))
    holder = table.add(range(50, 70), count=9)
    table.step()
    waiting = table.add([*range(33), *range(70, 90)], count=1)
    table.step()
    prefixes._key = counted = CountedKeys(prefixes._key)
    for _ in range(4):
        table.step()
    assert counted.packed <= 4 + 1, "one each step, and one that the other has filled"
    assert waiting.state is SequenceState.WAITING
    table.finish(holder)
    table.step()
    assert waiting.cached_tokens == 33


def test_what_was_evicted_while_one_waited_is_not_found() -> None:
    table = Table(blocks=14)
    table.finish(table.add(range(33), count=1))
    holder = table.add(range(50, 70), count=22)
    table.step()
    waiting = table.add([*range(33), *range(70, 90)], count=1)
    table.finish(holder)
    table.step()
    assert waiting.cached_tokens is not None
    assert 0 < waiting.cached_tokens < 32
    assert waiting.blocks[0] in table.scheduler._prefixes._keys


def test_choices_of_one_prompt_look_it_up_once() -> None:
    table = Table()
    prefixes: Any = table.scheduler._prefixes
    prompt = tuple(range(33))
    table.finish(table.add(prompt, count=1))
    prefixes._key = counted = CountedKeys(prefixes._key)
    choices = [table.add(prompt, shares=shares) for shares in (True, True, False, True, True)]
    table.step()
    assert [each.cached_tokens for each in choices] == [32, 32, 0, 32, 32]
    assert counted.packed <= 8
    assert choices[0].blocks[:8] == choices[-1].blocks[:8] != choices[2].blocks[:8]
