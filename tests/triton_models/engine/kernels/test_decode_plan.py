import pytest
import torch

from triton_models.engine.kernels.decode_plan import (
    SEGMENTS,
    DecodeWorkspace,
    choose_splits,
    decode_config,
    padded_group,
)


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_splits(1, 2, 132, 8192) == SEGMENTS
    assert choose_splits(1, 2, 132, 259) == 3
    assert choose_splits(32, 2, 132, 8192) == 2
    assert choose_splits(512, 2, 132, 8192) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_tiles_are_what_a_dot_takes(head_dim: int, dtype: torch.dtype) -> None:
    tile = decode_config(head_dim, dtype).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0


def test_query_heads_are_filled_up_to_what_a_dot_takes() -> None:
    assert [padded_group(heads, 1) for heads in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_a_reset_workspace_forgets_a_launch_that_failed_midway() -> None:
    workspace = DecodeWorkspace(rows=2, query_heads=6, kv_heads=2, head_dim=16, device=torch.device("cpu"))
    workspace.arrivals[1, 0] = 3
    workspace.reset()
    assert not workspace.arrivals.any()
