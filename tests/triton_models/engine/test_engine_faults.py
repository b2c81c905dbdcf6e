"""What one request, one mask or one step can break, and what it cannot."""

from dataclasses import replace

import pytest
import torch

from tests.triton_models.engine.fake_model import (
    GREEDY,
    POISON,
    FakeModel,
    NearMask,
    continuation,
    ids,
    request,
    run,
)
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason
from triton_models.engine.settings import EngineSettings
from triton_models.errors import (
    EngineStoppedError,
    TokenMaskError,
)

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


def test_nan_in_one_request_is_its_own_error_and_leaves_nothing_behind() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("healthy", [4, 5, 6]))
    engine.add(request("sick", [POISON] * 4))
    outputs = run(engine)
    assert [each.finish_reason for each in outputs["sick"]] == [FinishReason.ERROR]
    assert outputs["sick"][0].error == "the model's output is not finite"
    assert ids(outputs["healthy"]) == continuation([4, 5, 6], 8)
    # The blocks that held NaN are given out again.
    for number in range(4):
        engine.add(request(str(number), [number, 7]))
    for name, answer in run(engine).items():
        assert ids(answer) == continuation([int(name), 7], 8)


def test_nan_in_the_first_block_does_not_reach_rows_that_are_padded() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("sick", [POISON] * 40))
    engine.step()
    for name, prompt in (("short", [4]), ("long", [5] * 7)):
        engine.add(request(name, prompt, replace(GREEDY, max_tokens=5), priority=-1))
    outputs = run(engine)
    assert outputs["sick"][0].error == "the model's output is not finite"
    assert ids(outputs["short"]) == continuation([4], 5)
    assert ids(outputs["long"]) == continuation([5] * 7, 5)


def test_a_failed_step_ends_the_running_requests_and_no_other() -> None:
    model = FakeModel()
    engine = Engine(model, replace(SMALL, max_running=2))
    for number in range(4):
        engine.add(request(str(number), [number] * 5))
    engine.step()
    model.faults = 1
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    engine.fail_running("the step failed")
    failed = [each.request_id for each in engine.take_outputs() if each.finish_reason is FinishReason.FAULT]
    assert failed == ["0", "1"]
    assert engine.stats().kv_blocks_used == 0
    outputs = run(engine)
    assert {key: ids(value) for key, value in outputs.items()} == {
        "2": continuation([2] * 5, 8),
        "3": continuation([3] * 5, 8),
    }


def test_shut_down_answers_everyone_and_takes_no_more() -> None:
    engine = Engine(FakeModel(), replace(SMALL, max_running=1))
    engine.add(request("running"))
    engine.add(request("waiting"))
    engine.step()
    engine.add(request("new"))
    engine.take_outputs()
    engine.shut_down(FinishReason.SHUTDOWN, "stopped")
    assert [(each.request_id, each.finish_reason) for each in engine.take_outputs()] == [
        (name, FinishReason.SHUTDOWN) for name in ("running", "waiting", "new")
    ]
    assert engine.stats().kv_blocks_used == 0
    with pytest.raises(EngineStoppedError):
        engine.add(request("late"))


class OnlyAfter(NearMask):
    """Allows the token that follows the last by one, and notes what it was told."""

    def __init__(self, *, limit: int = 1000) -> None:
        self.told: list[int] = []
        self.limit = limit

    def fill(self, words: torch.Tensor) -> None:
        if len(self.told) >= self.limit:
            raise TokenMaskError("the grammar is stuck")
        token = (self.told[-1] + 1) % 61 if self.told else 30
        words[token // 32] = 1 << token % 32 if token % 32 < 31 else -(1 << 31)

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)


def test_a_mask_chooses_and_is_told_each_token_once_even_across_preemption() -> None:
    masks = [OnlyAfter() for _ in range(4)]
    engine = Engine(FakeModel(), replace(SMALL, kv_blocks=12))
    for number, mask in enumerate(masks):
        params = SamplingParams(temperature=1.0 if number else 0.0, max_tokens=30, mask=mask)
        engine.add(request(str(number), [number] * 5, params))
    outputs = run(engine)
    assert engine.stats().preemptions > 0
    for number, mask in enumerate(masks):
        assert ids(outputs[str(number)]) == list(range(30, 60))
        assert mask.told == list(range(30, 59))


def test_a_mask_that_fails_fails_its_request_alone() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("stuck", sampling=replace(GREEDY, mask=OnlyAfter(limit=2))))
    engine.add(request("free"))
    outputs = run(engine)
    assert ids(outputs["stuck"]) == [30, 31]
    assert outputs["stuck"][-1].error == "the grammar is stuck"
    assert ids(outputs["free"]) == continuation([1, 2, 3], 8)


class Nothing(NearMask):
    def fill(self, words: torch.Tensor) -> None:
        pass

    def accept(self, token_id: int) -> None:
        pass


def test_a_mask_that_allows_nothing_is_an_error() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("a", sampling=replace(GREEDY, mask=Nothing())))
    assert run(engine)["a"][0].error == "no token is allowed here"
