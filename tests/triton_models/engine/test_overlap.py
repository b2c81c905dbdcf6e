"""The engine when a step is launched before the one before it was collected."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.fake_model import FakeModel, NearMask, continuation, ids, request, run
from tests.triton_models.engine.wild_mix import EvenTokens
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.runner import Runner
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Step

OVERLAPPED = replace(PLAIN, overlap=True)
SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


def overlapped(model: FakeModel, settings: EngineSettings = SMALL) -> Engine:
    return Engine(model, settings, backend=OVERLAPPED)


def test_the_device_has_the_next_step_before_the_host_sees_this_one() -> None:
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("a", (5, 6), SamplingParams(temperature=0.0, max_tokens=3)))
    engine.step()
    assert model.steps == [[0, 1], [2]]
    assert len(engine.take_outputs()) == 1
    engine.step()
    assert model.steps == [[0, 1], [2], [3]]


def test_no_step_is_launched_for_what_is_known_to_have_ended() -> None:
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("a", (5, 6), SamplingParams(temperature=0.0, max_tokens=3)))
    assert ids(run(engine)["a"]) == continuation((5, 6), 3)
    assert model.steps == [[0, 1], [2], [3]]


def test_a_token_behind_the_stop_is_dropped() -> None:
    wanted = continuation((5, 6), 4)
    stop = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=frozenset({wanted[2]}))
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("a", (5, 6), stop))
    outputs = run(engine)["a"]
    assert ids(outputs) == wanted[: wanted.index(wanted[2]) + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    engine.add(request("b", (7, 8, 9)))
    assert ids(run(engine)["b"]) == continuation((7, 8, 9), 8)
    assert engine.stats().kv_blocks_used == 0


def test_preemption_loses_no_token_that_is_on_its_way() -> None:
    prompts = [tuple(range(number + 1, number + 6)) for number in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    engine = overlapped(FakeModel(), replace(SMALL, kv_blocks=10))
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, sampling))
    outputs = run(engine)
    assert engine.stats().preemptions > 0
    for number, prompt in enumerate(prompts):
        assert ids(outputs[str(number)]) == continuation(prompt, 20)


def test_cancel_while_a_step_is_on_its_way() -> None:
    engine = overlapped(FakeModel())
    for name in "ab":
        engine.add(request(name, (1, 2), SamplingParams(temperature=0.0, max_tokens=6)))
    engine.step()
    engine.cancel("a")
    outputs = run(engine)
    assert outputs["a"][-1].finish_reason is FinishReason.CANCELLED
    assert ids(outputs["b"]) == continuation((1, 2), 6)
    assert engine.stats().kv_blocks_used == 0


class AllowOne(NearMask):
    """A token mask that allows exactly what follows from the token before it."""

    def __init__(self) -> None:
        self.next = 7
        self.asked = 0

    def fill(self, words: Tensor) -> None:
        self.asked += 1
        words[self.next // 32] = 1 << self.next % 32

    def accept(self, token_id: int) -> None:
        assert token_id == self.next
        self.next += 1


def test_a_mask_sees_every_token_before_it_is_asked_for_the_next() -> None:
    engine = overlapped(FakeModel())
    engine.add(request("masked", (1, 2), SamplingParams(temperature=0.0, max_tokens=5, mask=AllowOne())))
    engine.add(request("free", (3, 4), SamplingParams(temperature=0.0, max_tokens=5)))
    outputs = run(engine)
    assert ids(outputs["masked"]) == [7, 8, 9, 10, 11]
    assert ids(outputs["free"]) == continuation((3, 4), 5)


def test_a_mask_costs_no_step() -> None:
    """The forward pass does not wait for the mask, so both get a token in every step."""
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("masked", (1, 2), SamplingParams(temperature=0.0, max_tokens=5, mask=AllowOne())))
    engine.add(request("free", (3, 4), SamplingParams(temperature=0.0, max_tokens=5)))
    engine.step()
    assert model.steps == [[0, 1, 0, 1], [2, 2]]  # the second was begun before the mask was told a token
    run(engine)
    assert model.steps[2:] == [[3, 3], [4, 4], [5, 5]]


def test_a_mask_is_not_asked_after_its_answers_end() -> None:
    mask = AllowOne()
    stop = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=frozenset({9}), mask=mask)
    engine = overlapped(FakeModel())
    engine.add(request("masked", (1, 2), stop))
    engine.add(request("free", (3, 4)))
    outputs = run(engine)
    assert ids(outputs["masked"]) == [7, 8, 9]
    assert outputs["masked"][-1].finish_reason is FinishReason.STOP
    assert mask.asked == 3
    assert ids(outputs["free"]) == continuation((3, 4), 8)
    assert engine.stats().kv_blocks_used == 0


def test_a_sampling_that_cannot_be_launched_costs_the_step_before_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = overlapped(FakeModel())
    engine.add(request("masked", (1, 2), SamplingParams(temperature=0.0, max_tokens=5, mask=AllowOne())))
    sample, calls = Runner.sample, []

    def second_fails(runner: Runner, step: Step) -> None:
        calls.append(step)
        if len(calls) == 2:
            raise RuntimeError("device is gone")
        sample(runner, step)

    monkeypatch.setattr(Runner, "sample", second_fails)
    assert engine.step() is not None
    assert [each.token_id for each in engine.take_outputs()] == [7]
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    engine.fail_running("broken")
    assert [each.error for each in engine.take_outputs()] == ["broken"]
    engine.add(request("b", (1, 2)))
    assert ids(run(engine)["b"]) == continuation((1, 2), 8)


def test_a_failed_step_ends_what_ran_in_it() -> None:
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("a", (1, 2)))
    model.faults = 1
    with pytest.raises(RuntimeError):
        engine.step()
    engine.fail_running("broken")
    assert engine.take_outputs()[-1].finish_reason is FinishReason.FAULT
    engine.add(request("b", (1, 2)))
    assert ids(run(engine)["b"]) == continuation((1, 2), 8)


def test_a_step_that_cannot_be_launched_costs_the_one_before_it_nothing() -> None:
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("a", (1, 2)), request("last", (3, 4), SamplingParams(temperature=0.0, max_tokens=1)))
    model.faults, model.sound_steps = 1, 1
    assert engine.step() is not None
    outputs = {each.request_id: each for each in engine.take_outputs()}
    assert [outputs["a"].token_id] == continuation((1, 2), 1)
    assert [outputs["last"].token_id] == continuation((3, 4), 1)
    assert outputs["last"].finish_reason is FinishReason.LENGTH
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    engine.fail_running("broken")
    assert [(each.request_id, each.error) for each in engine.take_outputs()] == [("a", "broken")]
    assert (engine.open_requests, engine.stats().failed_steps) == (0, 1)


def test_what_did_not_run_in_the_failed_step_goes_on() -> None:
    model = FakeModel()
    engine = overlapped(model)
    long = tuple(range(1, 21))
    engine.add(request("free", (3, 4)), request("long", long))
    engine.step()
    # It leaves the long prompt no room in the third step, which is the one that fails.
    engine.add(request("urgent", (5, 6, 7, 8, 9, 10, 11, 12), priority=-1))
    model.faults = 1
    engine.step()
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    engine.fail_running("broken")
    before = engine.take_outputs()
    assert {each.request_id for each in before if each.error} == {"free", "urgent"}
    assert ids(run(engine)["long"]) == continuation(long, 8)


def test_results_that_are_lost_take_the_step_on_its_way_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = overlapped(FakeModel())
    engine.add(request("a", (1, 2)))
    engine.step()
    engine.add(request("b", (3, 4)), request("never"), request("ran", (5,)), request("waits", (6,)))
    engine.take_outputs()

    def lost(*_: object) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "collect", lost)
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
    engine.fail_running("broken")
    failed = {each.request_id for each in engine.take_outputs()}
    assert failed == {"a", "b", "never", "ran"}
    assert ids(run(engine)["waits"]) == continuation((6,), 8)


def test_tokens_behind_an_answers_end_are_not_counted() -> None:
    wanted = continuation((5, 6), 3)
    stop = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=frozenset({wanted[2]}))
    model = FakeModel()
    engine = overlapped(model)
    engine.add(request("a", (5, 6), stop))
    counted = 0
    while stats := engine.step():
        counted += stats.decode_tokens
    used = len(ids(engine.take_outputs())) - 1
    assert (counted, len(model.steps)) == (used, 1 + used + 1)


def seeded(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        top_p=0.9 if number % 2 else 1.0,
        seed=number,
        max_tokens=12,
        mask=EvenTokens() if number % 3 == 0 else None,
    )


@pytest.mark.parametrize("make", [overlapped, lambda model: Engine(model, SMALL)])
def test_seeds_draw_the_same_with_overlap_and_without(make: Callable[[FakeModel], Engine]) -> None:
    torch.manual_seed(0)
    alone = Engine(FakeModel(), SMALL)
    together = make(FakeModel())
    for number in range(6):
        together.add(request(str(number), (number + 1, 3), seeded(number)))
    outputs = run(together)
    for number in range(6):
        alone.add(request("x", (number + 1, 3), seeded(number)))
        assert ids(outputs[str(number)]) == ids(run(alone)["x"])
