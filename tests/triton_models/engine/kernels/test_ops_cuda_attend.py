"""What a step's rows decide about the launches of its attention."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.triton_models.engine.kernels.test_linear import random
from triton_models.engine import ops_cuda
from triton_models.engine.blocks import KVCache
from triton_models.engine.models import Alibi, KVShape, Rotary, StepLayout
from triton_models.engine.ops_cuda import CudaOperations


@pytest.mark.parametrize("knows", [Rotary, Alibi, None])
def test_decodes_without_prompts_take_no_launch_to_rotate_and_store(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, knows: type[Rotary | Alibi] | None
) -> None:
    """They come to what they do beside prompts, of which padding leaves none here."""
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=4, dtype=torch.float32, device=device)
    cache = KVCache(shape, blocks=4, block_size=16, dtype=torch.float32, device=device)
    operations = CudaOperations(model, cache, rows=2)
    past = random(2, *cache.keys.shape, dtype=torch.float32, device=device)
    projected = random(2, 8, 16, dtype=torch.float32, device=device, seed=1)
    angles = random(40, 4, dtype=torch.float32, device=device, seed=2)
    rotary = {Rotary: Rotary(angles.cos(), angles.sin()), Alibi: Alibi(angles[0].abs()), None: None}[knows]
    lengths = torch.tensor([33, 16], dtype=torch.int32, device=device)
    layout = StepLayout(
        tables=torch.tensor([[2, 4, 1], [3, 0, 0]], dtype=torch.int32, device=device),
        slots=torch.tensor([0, 1], dtype=torch.int32, device=device),
        positions=lengths.long() - 1,
        decode_lengths=lengths,
        longest_decode=33,
    )
    no_prompts = torch.zeros((1, 4), dtype=torch.int32, device=device)
    results = []
    for tiles in (no_prompts, None):
        if tiles is None:
            monkeypatch.setattr(ops_cuda, "rotate_store", None)
        cache.keys.copy_(past[0])
        cache.values.copy_(past[1])
        operations.begin(replace(layout, tiles=tiles))
        attended = operations.attend(0, projected.clone(), rotary)
        results.append((attended, cache.keys.clone(), cache.values.clone()))
    assert [torch.equal(*pair) for pair in zip(*results, strict=True)] == [True] * 3
    changed = (results[0][2] != past[1]).nonzero()[:, 1:3].unique(dim=0)
    assert changed.tolist() == [[1, 0], [3, 15]]
