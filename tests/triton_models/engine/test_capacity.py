from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import random_model
from tests.triton_models.engine.fake_model import FakeModel
from tests.triton_models.engine.test_warm_up import SHAPE
from triton_models.engine import capacity
from triton_models.engine.capacity import (
    GIB,
    Profile,
    choose_capacity,
    free_bytes,
    needed_bytes,
    profile_steps,
    total_bytes,
)
from triton_models.engine.engine import Engine
from triton_models.engine.models import KVShape
from triton_models.engine.scoring import SLICE_ROWS
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.errors import SettingsError

CPU = torch.device("cpu")
MIB = 2**20
SETTINGS = EngineSettings(max_running=64, max_batched_tokens=1024)
PLENTY = 2**40
"""An activation that is larger than whatever the sampler needs."""


def test_blocks_that_were_set_are_taken() -> None:
    found = choose_capacity(EngineSettings(kv_blocks=20, block_size=8), FakeModel())
    assert (found.kv_blocks, found.max_context) == (20, 128)
    assert found.reason == "20 KV blocks of 8 tokens: kv_blocks was set"


def test_memory_is_divided_into_blocks() -> None:
    model = FakeModel()
    model.kv_shape = KVShape(layers=4, heads=2, head_dim=64)
    model.dtype = torch.bfloat16
    found = choose_capacity(EngineSettings(kv_memory_gib=1 / 64, block_size=16), model)
    assert found.kv_blocks == GIB // 64 // (16 * 4 * 2 * 64 * 2 * 2)


def test_no_more_blocks_than_all_sequences_can_use() -> None:
    settings = EngineSettings(kv_memory_gib=1.0, block_size=16, max_running=3, max_context=50)
    found = choose_capacity(settings, FakeModel())
    assert found.kv_blocks == 3 * 4
    assert "all that 3 sequences of 50 tokens can use" in found.reason


def test_a_context_that_the_blocks_cannot_hold_is_cut_and_said() -> None:
    found = choose_capacity(EngineSettings(kv_blocks=3, block_size=16), FakeModel())
    assert found.max_context == 48
    assert "the context is 48 instead of 128 tokens" in found.reason


def test_without_a_word_a_share_of_the_machine_is_taken() -> None:
    found = choose_capacity(EngineSettings(max_running=2), FakeModel())
    assert found.kv_blocks == 16
    assert "main memory" in found.reason


@pytest.mark.parametrize(("limit", "blocks"), [("max", 16), ("8000", 7)])
def test_a_containers_limit_is_heeded(container: Path, limit: str, blocks: int) -> None:
    (container / "memory.max").write_text(f"{limit}\n", encoding="ascii")
    # A quarter of 7936 bytes, in blocks of 256.
    assert choose_capacity(EngineSettings(max_running=2), FakeModel()).kv_blocks == blocks


@pytest.mark.parametrize(
    "requested",
    [{"kv_blocks": 10**12}, {"kv_memory_gib": 1e9, "max_running": 10**9, "max_batched_tokens": 10**9}],
)
def test_more_than_the_machine_has_is_refused_before_it_is_taken(requested: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"KV blocks .* take [\d,.]+ GiB, and cpu has "):
        choose_capacity(EngineSettings(**requested), FakeModel())


def on_gpu(monkeypatch: pytest.MonkeyPatch, *, free: int, steps: int = 0) -> FakeModel:
    """A model on a GPU with `free` bytes, of which the largest steps need `steps`."""
    monkeypatch.setattr(capacity, "free_bytes", lambda _, share: int(share * free))
    monkeypatch.setattr(capacity, "total_bytes", lambda _: 2 * free)
    monkeypatch.setattr(capacity, "profile_steps", lambda run_largest, *_: run_largest())
    monkeypatch.setattr(capacity, "needed_bytes", lambda *_: steps)
    model = FakeModel()
    model.device = torch.device("cuda:0")
    return model


def test_on_a_gpu_the_cache_gets_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, free=100 * 256, steps=60 * 256)
    found = choose_capacity(EngineSettings(), model)
    assert found.kv_blocks == 38, "95 % of the other 40"
    assert found.reason.startswith("38 KV blocks of 16 tokens: 95% of 0.0 GiB free on cuda:0, less")


def test_a_share_of_a_gpu_is_what_the_cache_and_the_steps_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, free=200 * 256, steps=60 * 256)
    found = choose_capacity(EngineSettings(memory_share=0.5), model)
    assert found.kv_blocks == 38, "95 % of 100 blocks without 60"
    assert "a share of 0.5" in found.reason


def test_a_share_of_a_gpu_does_not_depend_on_what_others_take_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, held = torch.device("cuda:0"), 12 * GIB
    for free, own in ((60, 40 - 12 - 1), (45, 27), (20, 20)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held)
        assert free_bytes(gpu, 0.5) == own * GIB
        assert free_bytes(gpu) == free * GIB


def test_a_share_of_main_memory(container: Path) -> None:
    (container / "memory.max").write_text("8064\n", encoding="ascii")
    assert free_bytes(CPU, 0.25) == 2000


def test_steps_that_need_more_than_there_is_leave_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, free=100 * 256, steps=101 * 256)
    with pytest.raises(SettingsError, match="a KV block takes 256 bytes and 0 are there"):
        choose_capacity(EngineSettings(), model)


@pytest.mark.parametrize("requested", [{"kv_blocks": 4}, {"kv_memory_gib": 4 * 256 / GIB}])
def test_no_steps_are_run_for_a_cache_of_a_given_size(
    monkeypatch: pytest.MonkeyPatch, requested: dict[str, Any]
) -> None:
    model = on_gpu(monkeypatch, free=100 * 256)
    assert choose_capacity(EngineSettings(**requested), model, pytest.fail).kv_blocks == 4


def test_on_the_cpu_no_steps_are_run() -> None:
    assert choose_capacity(EngineSettings(max_running=2), FakeModel(), pytest.fail).kv_blocks == 16


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_context 129 exceeds the 128 positions"):
        choose_capacity(EngineSettings(max_context=129), FakeModel())
    with pytest.raises(SettingsError, match="a KV block takes 256 bytes and 107 are there"):
        choose_capacity(EngineSettings(kv_memory_gib=1e-7), FakeModel())


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("triton_models.engine.capacity._CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("64\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text("anon 64\ninactive_file 0\n", encoding="ascii")
    return tmp_path


def test_the_machine_has_more_than_is_free(container: Path) -> None:
    (container / "memory.max").write_text("max\n", encoding="ascii")
    assert 0 < free_bytes(CPU) < total_bytes(CPU)


def test_a_containers_limit_bounds_what_is_free(container: Path) -> None:
    (container / "memory.max").write_text("8000\n", encoding="ascii")
    assert free_bytes(CPU) == 8000 - 64
    assert total_bytes(CPU) == 8000


def test_files_that_a_container_has_read_are_not_in_the_way(container: Path) -> None:
    """Reading a checkpoint fills a container's memory up to its limit."""
    (container / "memory.max").write_text("8000\n", encoding="ascii")
    (container / "memory.current").write_text("7990\n", encoding="ascii")
    (container / "memory.stat").write_text("anon 990\ninactive_file 7000\n", encoding="ascii")
    assert free_bytes(CPU) == 8000 - 990


def test_a_full_container_has_nothing_left(container: Path) -> None:
    (container / "memory.max").write_text("8000\n", encoding="ascii")
    (container / "memory.current").write_text("9000\n", encoding="ascii")
    assert free_bytes(CPU) == 0


def needed(settings: EngineSettings = SETTINGS, *, vocabulary: int = 1000, **bytes_: int) -> int:
    return needed_bytes(Profile(**bytes_), settings, vocabulary)


def test_graphs_have_activations_of_their_own() -> None:
    assert needed(held=5, activations=PLENTY, graphs=0) == 5
    assert needed(held=5, activations=PLENTY, graphs=3) == 5 + PLENTY + 3 * 2 * MIB


def test_sampling_by_every_rule_may_take_more_than_the_profile_run() -> None:
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
    """Has a given amount of memory, and steps that take some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1000 * MIB
        self.peak = 10 * MIB
        monkeypatch.setattr(capacity, "free_bytes", lambda *_: self.free)
        for name, stand_in in {
            "reset_peak_memory_stats": lambda _: None,
            "memory_allocated": lambda _: 10 * MIB,
            "max_memory_allocated": lambda _: self.peak,
            "synchronize": self.finish,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def run_largest(self) -> int:
        self.peak += 200 * MIB
        self.free -= 250 * MIB
        return 50

    def finish(self, _: torch.device) -> None:
        """Load what the device needs to run the steps, which the host has only launched."""
        self.free -= 50 * MIB


def test_what_the_largest_steps_take_is_measured_when_they_have_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch)
    found = profile_steps(gpu.run_largest, torch.device("cuda:0"))
    assert found == Profile(held=300 * MIB, activations=200 * MIB, graphs=50)
    assert needed_bytes(found, SETTINGS, FakeModel.vocab_size) == (300 + 200 + 100) * MIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_engine_takes_no_more_than_was_found_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda:0")
    model = random_model(replace(SHAPE, vocabulary=65024), dtype=dtype, device=device)
    left: list[int] = []

    def watched(profile: Profile, settings: EngineSettings, vocabulary: int) -> int:
        steps = needed_bytes(profile, settings, vocabulary)
        left.append(free_bytes(device) + profile.held - steps)
        return steps

    monkeypatch.setattr(capacity, "needed_bytes", watched)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    engine = Engine(model, EngineSettings(max_running=256, max_batched_tokens=1024))
    warm_up(engine)
    blocks = engine.stats().kv_blocks + 1
    cache = blocks * engine.settings.block_tokens * model.kv_shape.bytes_per_token(dtype)
    assert free_bytes(device) + cache >= left[0]
