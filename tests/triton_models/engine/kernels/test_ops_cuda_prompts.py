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
    MANY_KEYS,
    MANY_ROWS,
    make_tiles,
)
from triton_models.engine.models import Alibi, ChunkRows, KVShape, StepLayout, Tile
from triton_models.engine.ops_cuda import CudaOperations
from triton_models.engine.ops_hopper import FEW_HOPPER_ROWS, HOPPER_ROWS, HopperAttention
from triton_models.engine.slots import SlotTable


def layout_of(tiles: list[Tile], rows: int, device: torch.device, *, many_keys: bool = False) -> StepLayout:
    """Return a step without decodes, of which only tiles and the number of rows matter."""
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    return StepLayout(
        tables=positions.int()[:2, None],
        slots=positions.int(),
        positions=positions,
        decode_lengths=positions[:0].int(),
        longest_decode=0,
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        many_keys=many_keys,
    )


@pytest.fixture(autouse=True)
def _no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every GPU be another kind, but where a test says otherwise."""
    monkeypatch.setattr(ops_cuda, "hopper_attention", lambda *_, **__: None)


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
    tiles, many_keys = operations.tiles([ChunkRows(1, 0, 5, 0), ChunkRows(0, 5, rows, 3)])
    assert not many_keys
    padded = next(size for size in graphs.prompt_sizes(2048) if size >= rows)
    assert len(tiles) <= operations.most_tiles(padded, 2, many_keys=False)
    for size in (rows, padded):
        operations.begin(layout_of(tiles, size, device))
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
    few, many_keys = operations.tiles([ChunkRows(1, 3, 7, 100_000)])
    assert many_keys == (parts > 1)
    assert len(few) == max(tile.parts for tile in few) * (4 if parts == 1 else 1)
    assert max(tile.parts for tile in few) == parts
    for chunk in (ChunkRows(1, 0, FEW_ROWS + 1, 100_000), ChunkRows(1, 0, FEW_ROWS, MANY_KEYS - FEW_ROWS)):
        tiles, many_keys = operations.tiles([chunk])
        assert max(tile.parts for tile in tiles) == 1
        assert not many_keys
    assert operations.many_keys_rows == (FEW_ROWS if parts > 1 else 0)
    for rows in range(1, FEW_ROWS + 1):
        tiles, many_keys = operations.tiles([ChunkRows(1, 0, rows, 100_000)])
        assert len(tiles) <= operations.most_tiles(rows, 1, many_keys=many_keys)


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
            many_keys=divided,
        )
        operations.begin(layout)
        results.append(operations.attend(0, projected.clone(), None))
    assert_close(results[1], results[0].double())


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize(
    ("rows", "before", "for_hopper"),
    [
        (FEW_HOPPER_ROWS, 8000, False),
        (FEW_HOPPER_ROWS + 1, 8000, True),
        (HOPPER_ROWS, 8000, True),
        (HOPPER_ROWS, MANY_KEYS - HOPPER_ROWS, False),
        (HOPPER_ROWS + 1, 0, True),
        (2048, 8000, True),
    ],
)
def test_what_is_for_hopper(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    before: int,
    *,
    for_hopper: bool,
    slopes: bool,
) -> None:
    """Many rows, and fewer after many tokens, with tiles made for it; in a captured step as well."""
    shape = KVShape(layers=1, heads=2, head_dim=128)
    hopper = HopperAttention(32, shape, programs=132, device=device)
    hopper.attend, plain = Mock(), Mock()
    monkeypatch.setattr(ops_cuda, "_sm_count", lambda _: 132)
    monkeypatch.setattr(ops_cuda, "hopper_attention", lambda *_, **__: hopper)
    monkeypatch.setattr(ops_cuda, "prefill_attention", plain)
    monkeypatch.setattr(ops_cuda, "rotate_store", lambda *_, **__: None)
    model = SimpleNamespace(kv_shape=shape, query_heads=32, dtype=torch.bfloat16, device=device)
    cache = SimpleNamespace(keys=[None], values=[None], block_size=64)
    operations = CudaOperations(model, cache, rows=1)
    tiles, many_keys = operations.tiles([ChunkRows(0, 0, rows, before)])
    assert many_keys == (before == 8000 and rows <= HOPPER_ROWS)
    assert max(tile.tokens for tile in tiles) == (8 if for_hopper else 4)
    leaning = Alibi(torch.zeros(32)) if slopes else None
    chosen, other = (hopper.attend, plain) if for_hopper else (plain, hopper.attend)
    for size in (rows, next(size for size in graphs.prompt_sizes(2048) if size >= rows)):
        assert len(tiles) <= operations.most_tiles(size, 1, many_keys=many_keys)
        layout = layout_of(tiles, size, device, many_keys=many_keys)
        operations.begin(layout)
        projected = torch.zeros(size, 36, 128, dtype=torch.bfloat16, device=device)
        operations.attend(0, projected, leaning)
        *_, given, out = chosen.call_args.args
        assert given is layout.tiles
        assert out.shape == (size, 32, 128)
        assert chosen.call_args.kwargs["slopes"] is (leaning.slopes if leaning else None)
        assert not other.called


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
    tiles, many_keys = operations.tiles(chunks)
    size = prompts.size_for(row, len(tiles), many_keys=many_keys)
    assert size is not None
    assert size.rows == 160
