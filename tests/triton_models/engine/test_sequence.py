import itertools
from dataclasses import replace

import pytest

from tests.triton_models.engine.fake_model import GREEDY, request
from triton_models.engine.sequence import Sequence, SequenceState

WAITING, PREFILL, DECODE, FINISHED = SequenceState
LEGAL = {
    (WAITING, PREFILL),
    (PREFILL, DECODE),
    (PREFILL, WAITING),
    (DECODE, WAITING),
    (WAITING, FINISHED),
    (PREFILL, FINISHED),
    (DECODE, FINISHED),
}
PATHS = {WAITING: [], PREFILL: [PREFILL], DECODE: [PREFILL, DECODE], FINISHED: [FINISHED]}


def sequence(seed: int | None = None) -> Sequence:
    ask = request("a", sampling=replace(GREEDY, seed=seed))
    return Sequence(ask, arrival=0, arrived_at=0.0, max_tokens=5)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SequenceState, repeat=2)))
def test_only_the_drawn_transitions_exist(before: SequenceState, after: SequenceState) -> None:
    each = sequence()
    for state in PATHS[before]:
        each.move_to(state)
    if (before, after) in LEGAL:
        each.move_to(after)
        assert each.state is after
    else:
        with pytest.raises(RuntimeError, match=f"{before.name} does not lead to {after.name}"):
            each.move_to(after)


def test_a_seed_is_the_requests_or_its_own() -> None:
    assert sequence(-7).seed == -7
    assert sequence(0).seed == 0
    assert sequence().seed != sequence().seed
