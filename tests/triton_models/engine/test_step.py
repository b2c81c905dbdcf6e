"""What a step uploads, and what it keeps on the device, and when."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.fake_model import FakeModel, continuation, request, run
from tests.triton_models.engine.wild_mix import EvenTokens
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.runner import Runner
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.engine.slots import Staging, upload
from triton_models.engine.step import Step

CPU = torch.device("cpu")
SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


@pytest.mark.parametrize("mask", [None, EvenTokens()], ids=["plain", "masked"])
def test_logits_do_not_outlive_their_sampling(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step's would be there beside the next one's, for which no memory is set aside."""
    begin, made = Runner.begin, list[weakref.ref[Tensor]]()

    def watched(runner: Runner, step: Step) -> None:
        assert not any(logits() is not None for logits in made)
        begin(runner, step)
        assert step.logits is not None
        made.append(weakref.ref(step.logits))

    monkeypatch.setattr(Runner, "begin", watched)
    engine = Engine(FakeModel(), SMALL, backend=replace(PLAIN, overlap=True))
    engine.add(request("a", range(1, 21), SamplingParams(max_tokens=5, mask=mask)))
    run(engine)
    assert len(made) == 7


def test_a_step_is_sampled_once_and_only_after_it_was_begun() -> None:
    engine = Engine(FakeModel(), SMALL, backend=PLAIN)
    engine.add(request("a", (1, 2)))
    engine._take_requests_and_cancels()
    step = engine._scheduler.schedule()
    with pytest.raises(RuntimeError, match="only a step that was begun"):
        engine._runner.sample(step)
    engine._runner.begin(step)
    engine._runner.sample(step)
    assert [each.token_id for each in engine._runner.collect(step)] == continuation((1, 2), 1)
    with pytest.raises(RuntimeError, match="only a step that was begun"):
        engine._runner.sample(step)


def test_every_list_comes_back_by_its_name_type_and_order() -> None:
    staging = Staging()
    staging.integers("ids", [3, -1, 2**63 - 1, -(2**63)])
    staging.floats("temperatures", [0.1, 2.0, -0.0])
    staging.integers("none", [])
    staging.integers("generated", (number * number for number in range(3)))
    views = staging.upload(CPU)
    assert views["ids"].tolist() == [3, -1, 2**63 - 1, -(2**63)]
    assert views["temperatures"].tolist() == [0.1, 2.0, -0.0]
    assert views["none"].tolist() == []
    assert views["generated"].tolist() == [0, 1, 4]
    assert {name: view.dtype for name, view in views.items()} == {
        "ids": torch.int64,
        "temperatures": torch.float64,
        "none": torch.int64,
        "generated": torch.int64,
    }


def test_numbers_arrive_as_they_are() -> None:
    assert upload(torch.tensor([5, -1], dtype=torch.int32), CPU).tolist() == [5, -1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_an_upload_does_not_wait_for_the_device() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = upload(torch.tensor([5, -1], dtype=torch.int32), torch.device("cuda:0"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.tolist() == [5, -1]
