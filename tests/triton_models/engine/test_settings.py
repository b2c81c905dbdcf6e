from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_models.engine.fake_model import FakeModel
from triton_models.engine.memory import GIB
from triton_models.engine.model import KVShape
from triton_models.engine.settings import EngineSettings, choose_capacity
from triton_models.errors import SettingsError


@pytest.mark.parametrize(
    "values",
    [
        {"max_context": 1},
        {"max_running": 0},
        {"max_waiting": -1},
        {"max_batched_tokens": 0},
        {"block_size": 0},
        {"kv_blocks": 0},
        {"kv_memory_gib": 0.0},
        {"kv_memory_gib": float("nan")},
        {"kv_memory_gib": float("inf")},
        {"failure_limit": 0},
        {"kv_blocks": 1, "kv_memory_gib": 1.0},
        {"max_batched_tokens": 100, "max_running": 128},
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(values))):
        EngineSettings(**values)


def test_blocks_that_were_set_are_taken() -> None:
    capacity = choose_capacity(EngineSettings(kv_blocks=20, block_size=8), FakeModel())
    assert (capacity.kv_blocks, capacity.max_context) == (20, 128)
    assert capacity.reason == "20 KV blocks of 8 tokens: kv_blocks was set"


def test_memory_is_divided_into_blocks() -> None:
    model = FakeModel()
    model.kv_shape = KVShape(layers=4, heads=2, head_dim=64)
    model.dtype = torch.bfloat16
    capacity = choose_capacity(EngineSettings(kv_memory_gib=1 / 64, block_size=16), model)
    assert capacity.kv_blocks == GIB // 64 // (16 * 4 * 2 * 64 * 2 * 2)


def test_no_more_blocks_than_all_sequences_can_use() -> None:
    settings = EngineSettings(kv_memory_gib=1.0, block_size=16, max_running=3, max_context=50)
    capacity = choose_capacity(settings, FakeModel())
    assert capacity.kv_blocks == 3 * 4
    assert "all that 3 sequences of 50 tokens can use" in capacity.reason


def test_a_context_that_the_blocks_cannot_hold_is_cut_and_said() -> None:
    capacity = choose_capacity(EngineSettings(kv_blocks=3, block_size=16), FakeModel())
    assert capacity.max_context == 48
    assert "the context is 48 instead of 128 tokens" in capacity.reason


def test_without_a_word_a_share_of_the_machine_is_taken() -> None:
    capacity = choose_capacity(EngineSettings(max_running=2), FakeModel())
    assert capacity.kv_blocks == 16
    assert "main memory" in capacity.reason


@pytest.mark.parametrize(("limit", "blocks"), [("max", 16), ("8000", 7)])
def test_a_containers_limit_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, blocks: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("64\n", encoding="ascii")
    monkeypatch.setattr("triton_models.engine.memory._CGROUP", tmp_path)
    # A quarter of 7936 bytes, in blocks of 256.
    assert choose_capacity(EngineSettings(max_running=2), FakeModel()).kv_blocks == blocks


@pytest.mark.parametrize(
    "asked",
    [{"kv_blocks": 10**12}, {"kv_memory_gib": 1e9, "max_running": 10**9, "max_batched_tokens": 10**9}],
)
def test_more_than_the_machine_has_is_refused_before_it_is_taken(asked: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"KV blocks .* take [\d,.]+ GiB, and cpu has "):
        choose_capacity(EngineSettings(**asked), FakeModel())


def on_gpu(monkeypatch: pytest.MonkeyPatch, *, free: int) -> FakeModel:
    monkeypatch.setattr("triton_models.engine.settings.free_bytes", lambda _: free)
    monkeypatch.setattr("triton_models.engine.settings.total_bytes", lambda _: 2 * free)
    model = FakeModel()
    model.device = torch.device("cuda:0")
    return model


def test_on_a_gpu_the_cache_gets_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, free=100 * 256)
    capacity = choose_capacity(EngineSettings(), model, lambda: 60 * 256)
    assert capacity.kv_blocks == 38, "95 % of the other 40"
    assert capacity.reason.startswith("38 KV blocks of 16 tokens: 95% of 0.0 GiB free on cuda:0, less")


def test_steps_that_need_more_than_there_is_leave_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, free=100 * 256)
    with pytest.raises(SettingsError, match="a KV block takes 256 bytes and 0 are there"):
        choose_capacity(EngineSettings(), model, lambda: 101 * 256)


@pytest.mark.parametrize("asked", [{"kv_blocks": 4}, {"kv_memory_gib": 4 * 256 / GIB}])
def test_what_steps_need_is_not_asked_for_a_cache_of_a_given_size(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    model = on_gpu(monkeypatch, free=100 * 256)
    assert choose_capacity(EngineSettings(**asked), model, pytest.fail).kv_blocks == 4


def test_on_the_processor_nothing_is_rehearsed() -> None:
    assert choose_capacity(EngineSettings(max_running=2), FakeModel(), pytest.fail).kv_blocks == 16


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_context 129 exceeds the 128 positions"):
        choose_capacity(EngineSettings(max_context=129), FakeModel())
    with pytest.raises(SettingsError, match="a KV block takes 256 bytes and 107 are there"):
        choose_capacity(EngineSettings(kv_memory_gib=1e-7), FakeModel())
