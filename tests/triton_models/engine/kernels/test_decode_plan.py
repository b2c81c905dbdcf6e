import pytest
import torch

from triton_models.engine.kernels.decode_plan import (
    SEGMENTS,
    DecodePlan,
    DecodeWorkspace,
    choose_splits,
    decode_config,
    padded_group,
    plan_decode,
)


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_splits(1, 2, 132, 8192) == SEGMENTS
    assert choose_splits(1, 2, 132, 259) == 3
    assert choose_splits(32, 2, 132, 8192) == 2
    assert choose_splits(512, 2, 132, 8192) == 1


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256, 1024])
def test_tiles_are_what_a_dot_takes(head_dim: int, dtype: torch.dtype, crowded: bool) -> None:
    tile = decode_config(head_dim, dtype, crowded=crowded).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0


def plan(batch: int, *, dtype: torch.dtype = torch.bfloat16, beside_prompts: bool = False) -> DecodePlan:
    """Return the plan for ChatGLM3-6B's heads on an H200."""
    return plan_decode(batch, 2, 128, dtype, sm_count=132, max_length=8192, beside_prompts=beside_prompts)


def test_more_programs_than_the_device_holds_get_smaller_tiles() -> None:
    assert plan(198).config.tile == 128
    assert plan(199).config.tile == 64
    assert plan(199).splits == 1


def test_prompts_in_the_step_leave_room_for_a_few_long_decodes() -> None:
    assert plan(512, beside_prompts=True) == DecodePlan(splits=4, config=plan(1).config)


def test_in_float32_rounding_does_not_depend_on_the_batch() -> None:
    assert plan(512, dtype=torch.float32).config == plan(1, dtype=torch.float32).config


def test_query_heads_are_filled_up_to_what_a_dot_takes() -> None:
    assert [padded_group(heads, 1) for heads in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_a_reset_workspace_forgets_a_launch_that_failed_midway() -> None:
    workspace = DecodeWorkspace(rows=2, query_heads=6, kv_heads=2, head_dim=16, device=torch.device("cpu"))
    workspace.arrivals[1, 0] = 3
    workspace.reset()
    assert not workspace.arrivals.any()
