from types import SimpleNamespace

import pytest
import torch

from triton_models.engine import kernel_operations
from triton_models.engine.captured_steps import CapturedPrompts
from triton_models.engine.kernel_operations import KernelSteps
from triton_models.engine.layout import ChunkRows, StepLayout
from triton_models.engine.model import KVShape
from triton_models.engine.slots import SlotTable


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
    steps = KernelSteps(model, None, rows=1)
    chunks, row = [], 0
    for slot, length in enumerate(lengths):
        chunks.append(ChunkRows(slot=slot, start=row, end=row + length, offset=0))
        row += length
    prompts = CapturedPrompts(
        None, SlotTable(64, 4, device), longest=512, largest=160, most_tiles=steps.most_tiles
    )
    assert prompts.size_for(row, len(steps.tiles(chunks))) == 160


@pytest.mark.parametrize(("decodes", "tile"), [(4, 128), (300, 64)])
def test_the_kernel_gets_the_plan_of_its_step(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, decodes: int, tile: int
) -> None:
    tiles: list[int] = []
    monkeypatch.setattr(kernel_operations, "rotate_store", lambda *_, **__: None)
    monkeypatch.setattr(
        kernel_operations, "decode_attention", lambda *_, config, **__: tiles.append(config.tile)
    )
    monkeypatch.setattr(kernel_operations, "_processors", lambda _: 132)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=128), query_heads=4, dtype=torch.bfloat16, device=device
    )
    cache = SimpleNamespace(keys=[None], values=[None])
    positions = torch.zeros(decodes, dtype=torch.int64, device=device)
    layout = StepLayout(
        tables=positions.int()[:, None],
        slots=positions.int(),
        positions=positions,
        decode_lengths=positions.int() + 1,
        longest_decode=4096,
    )
    projected = torch.zeros(decodes, 8, 128, dtype=torch.bfloat16, device=device)
    KernelSteps(model, cache, rows=decodes)(layout).attend(0, projected, SimpleNamespace(cos=None, sin=None))
    assert tiles == [tile]
