from dataclasses import replace

import pytest
import torch

from bench.engine import random_model
from tests.triton_models.engine.fake_model import FakeModel
from tests.triton_models.engine.test_warm_up import SHAPE
from triton_models.engine import rehearsal
from triton_models.engine.backend import PLAIN, choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.memory import free_bytes
from triton_models.engine.rehearsal import Rehearsed, memory_beside_cache, needed_bytes
from triton_models.engine.runner import Runner
from triton_models.engine.scoring import SLICE_ROWS
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up

MIB = 2**20
SETTINGS = EngineSettings(max_running=64, max_batched_tokens=1024)
PLENTY = 2**40
"""An activation that is larger than whatever the sampler needs."""


def needed(settings: EngineSettings = SETTINGS, *, vocabulary: int = 1000, **bytes_: int) -> int:
    return needed_bytes(Rehearsed(**bytes_), settings, vocabulary)


def test_graphs_have_activations_of_their_own() -> None:
    assert needed(held=5, activations=PLENTY, graphs=0) == 5
    assert needed(held=5, activations=PLENTY, graphs=3) == 5 + PLENTY + 3 * 2 * MIB


def test_sampling_by_every_rule_may_take_more_than_the_rehearsal() -> None:
    sampling = 10 * 64 * 1000 * 4
    assert needed(held=5, activations=7, graphs=0) == 5 + sampling - 7
    assert needed(held=5, activations=sampling + 1, graphs=0) == 5


def test_log_probabilities_of_prompts_may_take_more_than_sampling() -> None:
    settings = replace(SETTINGS, max_running=1)
    assert needed(settings, held=5, activations=7, graphs=0) == 5 + 4 * SLICE_ROWS * 1000 * 4 - 7


def test_steps_that_are_too_large_to_be_captured_are_reckoned_with() -> None:
    for settings in (replace(SETTINGS, max_batched_tokens=8192), replace(SETTINGS, burst_tokens=8192)):
        assert needed(settings, held=5, activations=PLENTY, graphs=0) == 5 + PLENTY


class FakeGpu:
    """Has the memory that it is told of, and a runner that takes some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1000 * MIB
        self.peak = 10 * MIB
        self.emptied_at: list[int] = []
        monkeypatch.setattr(rehearsal, "free_bytes", lambda _: self.free)
        monkeypatch.setattr(Runner, "rehearse", self.rehearse)
        for name, stand_in in {
            "reset_peak_memory_stats": lambda _: None,
            "memory_allocated": lambda _: 10 * MIB,
            "max_memory_allocated": lambda _: self.peak,
            "synchronize": lambda _: None,
            "empty_cache": lambda: self.emptied_at.append(self.free),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def rehearse(self) -> int:
        self.peak += 200 * MIB
        self.free -= 300 * MIB
        return 50


def test_what_the_rehearsal_took_is_measured_before_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    model = FakeModel()
    assert memory_beside_cache(model, PLAIN, SETTINGS) == (300 + 200 + 100) * MIB
    assert gpu.emptied_at == [700 * MIB]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_engine_takes_no_more_than_was_found_out(dtype: torch.dtype) -> None:
    device = torch.device("cuda:0")
    model = random_model(replace(SHAPE, padded_vocab_size=65024), dtype=dtype, device=device)
    settings = EngineSettings(max_running=256, max_batched_tokens=1024, kv_blocks=400)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    expected = memory_beside_cache(model, choose_backend(device, dtype), settings)
    before = free_bytes(device)
    engine = Engine(model, settings)
    warm_up(engine)
    cache = 401 * settings.block_size * model.kv_shape.bytes_per_token(dtype)
    assert before - free_bytes(device) - cache <= expected
