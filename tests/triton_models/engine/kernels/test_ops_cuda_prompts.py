"""Attention of prompts in the operations: who gets which tiles, in captured steps as well."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.triton_models.engine.kernels.paged import assert_close
from triton_models.engine import graphs, ops_cuda
from triton_models.engine.backend import PLAIN
from triton_models.engine.blocks import KVCache
from triton_models.engine.graphs import CapturedSteps, DeviceStep
from triton_models.engine.kernels.attention_prefill import (
    FEW_ROWS,
    MANY_ROWS,
    SPECIALISED_ROWS,
    make_tiles,
)
from triton_models.engine.models import Alibi, ChunkRows, KVShape, StepLayout
from triton_models.engine.ops_cuda import CudaOperations
from triton_models.engine.slots import SlotTable


@pytest.mark.parametrize(("block_size", "rows"), [(64, MANY_ROWS), (64, MANY_ROWS + 1), (16, 2048)])
def test_attention_gets_the_tiles_that_were_made_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, block_size: int, rows: int
) -> None:
    """In a captured step, too, whose rows and tiles are filled up."""
    monkeypatch.setattr(ops_cuda, "rotate_store", lambda *_, **__: None)
    launched = Mock()
    monkeypatch.setattr(ops_cuda, "prefill_attention", launched)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=128), query_heads=32, dtype=torch.bfloat16, device=device
    )
    cache = SimpleNamespace(keys=[None], values=[None], block_size=block_size)
    operations = CudaOperations(model, cache, rows=1)
    tiles = operations.tiles([ChunkRows(1, 0, 5, 0), ChunkRows(0, 5, rows, 3)])
    padded = next(size for size in graphs.prompt_sizes(2048) if size >= rows)
    assert len(tiles) <= operations.most_tiles(padded, 2, divided=False)
    for size in (rows, padded):
        positions = torch.zeros(size, dtype=torch.int64, device=device)
        layout = StepLayout(
            tables=positions.int()[:2, None],
            slots=positions.int(),
            positions=positions,
            decode_lengths=positions[:0].int(),
            longest_decode=0,
            tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        )
        operations.begin(layout)
        projected = torch.zeros(size, 36, 128, dtype=torch.bfloat16, device=device)
        operations.attend(0, projected, SimpleNamespace(cos=None, sin=None))
        config = launched.call_args.kwargs["config"]
        assert (config.in_blocks, config.rows) == (block_size == 64, 128 if rows == MANY_ROWS + 1 else 64)
        assert config.rows == 16 * max(tile.tokens for tile in tiles)


@pytest.mark.parametrize(("dtype", "parts"), [(torch.bfloat16, 64), (torch.float32, 1)])
def test_keys_of_few_new_tokens_after_many_are_divided(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, parts: int
) -> None:
    """In 16 bits, and with room for all parts in a captured step."""
    monkeypatch.setattr(ops_cuda, "_sm_count", lambda _: 132)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=128), query_heads=32, dtype=dtype, device=device
    )
    operations = CudaOperations(model, SimpleNamespace(block_size=64), rows=1)
    few = operations.tiles([ChunkRows(1, 3, 7, 100_000)])
    assert len(few) == max(tile.parts for tile in few) * (4 if parts == 1 else 1)
    assert max(tile.parts for tile in few) == parts
    many = [ChunkRows(1, 0, FEW_ROWS + 1, 100_000)]
    assert max(tile.parts for tile in operations.tiles(many)) == 1
    assert operations.divided_rows == (FEW_ROWS if parts > 1 else 0)
    for rows in range(1, FEW_ROWS + 1):
        tiles = operations.tiles([ChunkRows(1, 0, rows, 100_000)])
        assert len(tiles) <= operations.most_tiles(rows, 1, divided=parts > 1)


def test_divided_attention_is_close_to_plain(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the operations, of a layout that says so."""
    monkeypatch.setattr(ops_cuda, "_sm_count", lambda _: 8)
    heads, width = 4, 3 * 64
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=heads, dtype=torch.bfloat16, device=device)
    cache = KVCache(shape, blocks=width + 1, block_size=16, dtype=torch.bfloat16, device=device)
    torch.manual_seed(0)
    for each in (cache.keys, cache.values):
        each.normal_()
    operations = CudaOperations(model, cache, rows=1)
    chunk = ChunkRows(0, 0, 3, 16 * width - 40)
    projected = torch.randn(3, heads + 4, 16).to(torch.bfloat16).to(device)
    results = []
    for divided in (False, True):
        tiles = make_tiles([chunk], 32, keys=64, programs=8 * divided)
        assert (max(tile.parts for tile in tiles) > 1) == divided
        positions = torch.arange(chunk.offset, chunk.length, device=device)
        layout = StepLayout(
            tables=torch.arange(1, width + 1, dtype=torch.int32, device=device)[None],
            slots=torch.zeros(3, dtype=torch.int32, device=device),
            positions=positions,
            decode_lengths=positions[:0].int(),
            longest_decode=0,
            tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
            divided=divided,
        )
        operations.begin(layout)
        results.append(operations.attend(0, projected.clone(), None))
    assert_close(results[1], results[0].double())


@pytest.mark.parametrize(("rows", "slopes"), [(SPECIALISED_ROWS, False), (512, True), (512, False)])
def test_large_steps_go_to_specialised_warps(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, *, slopes: bool
) -> None:
    """But for scores that lean, with the tiles that were made for them."""
    specialised, plain = Mock(), Mock()
    monkeypatch.setattr(ops_cuda, "specialised_attention", lambda *_: specialised)
    monkeypatch.setattr(ops_cuda, "prefill_attention", plain)
    monkeypatch.setattr(ops_cuda, "rotate_store", lambda *_, **__: None)
    shape = KVShape(layers=1, heads=2, head_dim=128)
    model = SimpleNamespace(kv_shape=shape, query_heads=32, dtype=torch.bfloat16, device=device)
    cache = SimpleNamespace(keys=[None], values=[None], block_size=64)
    operations = CudaOperations(model, cache, rows=1)
    tiles = operations.tiles([ChunkRows(0, 0, rows, 70)])
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    layout = StepLayout(
        tables=positions.int()[:1, None],
        slots=positions.int(),
        positions=positions,
        decode_lengths=positions[:0].int(),
        longest_decode=0,
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
    )
    operations.begin(layout)
    projected = torch.zeros(rows, 36, 128, dtype=torch.bfloat16, device=device)
    operations.attend(0, projected, Alibi(torch.zeros(32)) if slopes else None)
    chosen = specialised if rows == 512 and not slopes else plain
    ((*_, given, out),) = [each.args for each in chosen.call_args_list]
    assert given is layout.tiles
    assert out.shape == (rows, 32, 128)
    assert max(tile.tokens for tile in tiles) == (8 if rows == 512 else 4)
    assert specialised.called != plain.called


def test_attention_that_does_not_work_here_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(ops_cuda, "_sm_count", lambda _: 132)
    shape = KVShape(layers=1, heads=2, head_dim=128)
    cuda = SimpleNamespace(type="cuda")
    model = SimpleNamespace(kv_shape=shape, query_heads=32, dtype=torch.bfloat16, device=cuda)
    cache = SimpleNamespace(keys=[None], values=[None], block_size=16)
    assert ops_cuda.specialised_attention(model, cache) is None
    assert not caplog.records, "blocks of 16 tokens are none of its business"
    cache.block_size = 64
    assert ops_cuda.specialised_attention(model, cache) is None
    assert "the one for Hopper fails here" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(32, 2), (32, 32), (4, 2)])
@pytest.mark.parametrize("lengths", [[160], [100, 60], [1] * 40 + [120]], ids=["one", "two", "many"])
def test_every_step_of_prompts_has_room_among_the_captured(
    device: torch.device, dtype: torch.dtype, query_heads: int, kv_heads: int, lengths: list[int]
) -> None:
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=kv_heads, head_dim=128),
        query_heads=query_heads,
        dtype=dtype,
        device=device,
    )
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    chunks, row = [], 0
    for slot, length in enumerate(lengths):
        chunks.append(ChunkRows(slot=slot, start=row, end=row + length, offset=0))
        row += length
    step = DeviceStep(model, PLAIN, operations, SlotTable(64, 4, device), longest=512)
    prompts = CapturedSteps(step, vocabulary=64, largest=160, operations=operations)
    size = prompts.size_for(row, len(operations.tiles(chunks)), divided=False)
    assert size is not None
    assert size.rows == 160
