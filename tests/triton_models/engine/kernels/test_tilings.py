import pytest
import torch

from triton_models.engine.kernels.linear import new_arrivals
from triton_models.engine.kernels.tilings import tiling_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "keys"), [(4608, 4096), (4096, 13696), (288, 96), (65024, 4096), (16, 8)]
)
def test_tiling_covers_any_shape(dtype: torch.dtype, outputs: int, keys: int, device: torch.device) -> None:
    chosen = tiling_for(outputs, keys, gated=False, dtype=dtype)
    tiles = -(-outputs // chosen.block_n)
    assert chosen.splits == 1 or tiles <= len(new_arrivals(device))
    assert chosen.block_n >= 16
    assert chosen.block_k >= 16
    assert chosen.splits <= -(-keys // chosen.block_k)
