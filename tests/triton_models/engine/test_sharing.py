"""The engine when prompts begin alike: each gets what it gets alone, and less is computed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.fake_model import GREEDY, POISON, FakeModel, continuation, ids, request, run
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.models import Operations
from triton_models.engine.sequence import FinishReason
from triton_models.engine.settings import EngineSettings

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


class Feverish(FakeModel):
    """Leaves NaN in the cache while `fever` lasts."""

    fever = False

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        if self.fever:
            tokens = torch.full_like(tokens, POISON)
        return super().forward(tokens, operations)


def test_the_outputs_tell_how_much_of_the_prompt_was_found() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL)
    prompt = list(range(7))
    engine.add(request("first", prompt))
    answer = ids(run(engine)["first"])
    model.steps.clear()
    engine.add(request("second", [*prompt, *answer, 1, 2]))
    outputs = run(engine)["second"]
    assert model.steps[0] == [14, 15, 16]
    assert {each.cached_tokens for each in outputs} == {14}
    assert ids(outputs) == continuation([*prompt, *answer, 1, 2], 8)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.lists(st.integers(0, 1), min_size=1, max_size=3),
            st.integers(1, 20),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(4, 12),
    st.integers(14, 40),
    st.booleans(),
)
def test_every_request_gets_what_it_gets_alone(
    requests: list[tuple[int, list[int], int, int]],
    budget: int,
    blocks: int,
    overlap: bool,
) -> None:
    settings = EngineSettings(max_running=4, max_batched_tokens=budget, block_size=4, kv_blocks=blocks)
    engine = Engine(FakeModel(), settings, backend=replace(PLAIN, overlap=overlap))
    for number, (common, rest, count, priority) in enumerate(requests):
        engine.add(
            request(str(number), [3] * common + rest, replace(GREEDY, max_tokens=count), priority=priority)
        )
    outputs = run(engine)
    for number, (common, rest, count, _) in enumerate(requests):
        assert ids(outputs[str(number)]) == continuation([3] * common + rest, count)
    assert engine.stats().kv_blocks_used == 0


def test_a_request_may_say_no() -> None:
    engine = Engine(FakeModel(), SMALL)
    for number, (shares, found) in enumerate([(False, 0), (True, 0), (True, 8), (False, 0)]):
        engine.add(replace(request(str(number), range(9)), prefix_cache=shares))
        assert run(engine)[str(number)][0].cached_tokens == found


def test_nan_that_was_cached_ends_those_who_find_it_and_is_gone_then() -> None:
    model = Feverish()
    engine = Engine(model, SMALL)
    prompt = list(range(20))
    model.fever = True
    engine.add(request("gone", prompt))
    engine.step()
    engine.cancel("gone")
    engine.step()
    model.fever = False
    for name, cached in (("finder", 8), ("next", 0), ("last", 16)):
        engine.add(request(name, prompt))
        outputs = run(engine)[name]
        assert outputs[0].cached_tokens == cached
        if name == "finder":
            assert outputs[-1].error == "the model's output is not finite"
        else:
            assert ids(outputs) == continuation(prompt, 8)


def test_nothing_is_found_that_a_failed_step_wrote() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL)
    engine.add(request("first", range(20)))
    engine.step()
    model.faults = 1
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    engine.fail_running("the step failed")
    assert [each.finish_reason for each in engine.take_outputs()] == [FinishReason.FAULT]
    engine.add(request("second", range(20)))
    outputs = run(engine)["second"]
    assert outputs[0].cached_tokens == 0
    assert ids(outputs) == continuation(range(20), 8)
