"""What a step keeps on the device, and when."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.triton_models.engine.fake_model import FakeModel, request, run
from tests.triton_models.engine.wild_mix import EvenTokens
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.runner import Begun, Runner
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


@pytest.mark.parametrize("mask", [None, EvenTokens()], ids=["plain", "masked"])
def test_logits_do_not_outlive_their_sampling(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step's would be there beside the next one's, for which no memory is set aside."""
    begin, made = Runner.begin, list[weakref.ref[Tensor]]()

    def watched(runner: Runner, batch: Any) -> Begun:
        assert not any(logits() is not None for logits in made)
        begun = begin(runner, batch)
        made.append(weakref.ref(begun.logits))
        return begun

    monkeypatch.setattr(Runner, "begin", watched)
    engine = Engine(FakeModel(), SMALL, backend=replace(PLAIN, overlap=True))
    engine.add(request("a", range(1, 21), SamplingParams(max_tokens=5, mask=mask)))
    run(engine)
    assert len(made) == 7
