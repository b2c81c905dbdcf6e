"""Attention of prompts on Hopper GPUs: tried where it is used. The kernel has tests of its own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triton_models.engine import ops_hopper
from triton_models.engine.kernels import attention_hopper
from triton_models.engine.kernels.attention_prefill import PrefillConfig, PrefillWorkspace, prefill_attention
from triton_models.engine.models import ChunkRows, KVShape
from triton_models.engine.ops_hopper import HopperAttention, hopper_attention


def in_plain_triton(*work: Tensor, workspace: PrefillWorkspace, programs: int, slopes: Tensor | None) -> None:
    """Do what `attention_hopper.attend` does."""
    assert programs in (5, 132)
    config = PrefillConfig(rows=128, keys=128, warps=4, stages=2)
    prefill_attention(*work, config=config, slopes=slopes, workspace=workspace)


@pytest.fixture
def model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a model's shape; its device passes for a Hopper GPU, for which the kernel is another here."""
    monkeypatch.setattr(ops_hopper, "_is_hopper", lambda _: True)
    monkeypatch.setattr(attention_hopper, "attend", in_plain_triton)
    shape = KVShape(layers=1, heads=2, head_dim=64)
    return SimpleNamespace(kv_shape=shape, query_heads=32, dtype=torch.bfloat16, device=device, leans=False)


@pytest.mark.parametrize("leans", [False, True])
def test_what_works_is_used_and_leaves_nothing(model: SimpleNamespace, *, leans: bool) -> None:
    model.leans = leans
    attention = hopper_attention(model, 64, programs=132)
    assert attention is not None
    assert not attention.attend.keywords["workspace"].arrivals.any()
    assert max(tile.parts for tile in attention.tiles([ChunkRows(0, 0, 60, 6000)])) > 1


def test_what_computes_something_else_is_not_used(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as parts that were not merged, which are a hundredth of the rows."""

    def attend(*work: Tensor, **options: Any) -> None:
        in_plain_triton(*work, **options)
        *_, tiles, out = work
        first = next(tile for tile in tiles.tolist() if tile[5] > 1)
        out[first[1]] = 0

    monkeypatch.setattr(attention_hopper, "attend", attend)
    assert hopper_attention(model, 64, programs=132) is None
    assert "the one for Hopper fails here: its results are" in caplog.text


def test_what_is_wrong_with_slopes_alone_is_used_without(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*work: Tensor, slopes: Tensor | None, **options: Any) -> None:
        in_plain_triton(*work, slopes=None, **options)

    monkeypatch.setattr(attention_hopper, "attend", attend)
    assert hopper_attention(model, 64, programs=132) is not None
    model.leans = True
    assert hopper_attention(model, 64, programs=132) is None


def test_what_is_wrong_with_several_tiles_a_program_is_not_used(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*work: Tensor, programs: int, **options: Any) -> None:
        in_plain_triton(*work, programs=programs, **options)
        if programs < 6:
            work[-1][:8] = 0

    monkeypatch.setattr(attention_hopper, "attend", attend)
    assert hopper_attention(model, 64, programs=132) is None


def test_what_does_not_run_is_not_used(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attend(*_: Tensor, **__: object) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(attention_hopper, "attend", attend)
    assert hopper_attention(model, 64, programs=132) is None
    assert "the one for Hopper fails here: out of registers" in caplog.text


def test_other_shapes_and_devices_are_none_of_its_business(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hopper_attention(model, 16, programs=132) is None
    monkeypatch.setattr(ops_hopper, "_is_hopper", lambda _: False)
    assert hopper_attention(model, 64, programs=132) is None
    assert not caplog.records


@pytest.mark.parametrize("rows", [129, 300, 700, 2048])
def test_tiles_have_room(device: torch.device, rows: int) -> None:
    attention = HopperAttention(32, KVShape(layers=1, heads=2, head_dim=128), programs=132, device=device)
    for chunks in (
        [ChunkRows(0, 0, rows, 100_000)],
        [ChunkRows(0, 0, 7, 50_000), ChunkRows(1, 7, rows, 100_000)],
    ):
        tiles = attention.tiles(chunks)
        assert len(tiles) <= attention.most_tiles(rows, len(chunks))
        assert sum(tile.tokens for tile in tiles if not tile.part) == rows
        assert max(tile.tokens for tile in tiles) == 8


def test_it_is_usable_again_after_a_failed_launch(device: torch.device) -> None:
    attention = HopperAttention(32, KVShape(layers=1, heads=2, head_dim=128), programs=132, device=device)
    arrivals = attention.attend.keywords["workspace"].arrivals
    arrivals.fill_(1)
    attention.reset()
    assert not arrivals.any()
