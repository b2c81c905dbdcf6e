"""Shapes and cases for checking and timing the attention kernels."""

from dataclasses import dataclass, replace
from typing import Final

import torch

from triton_models.engine.kernels.attention_decode import DecodePlan
from triton_models.engine.kernels.attention_prefill import PrefillConfig

SPECIALISED: Final = "specialised warps"
"""Attention by `HopperAttention`, which makes tiles of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Shapes and cases."""

    device: torch.device
    dtype: torch.dtype
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    pairs: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[tuple[int, int, int], ...]
    """For each case: number of sequences, earlier tokens of each, new tokens of each."""
    rotated: tuple[int, ...]
    decode_plans: tuple[DecodePlan, ...]
    prefill_configs: tuple[PrefillConfig | str, ...]
    """Ways to attend to prompts: `prefill_attention` with a config, or `SPECIALISED`."""
    block_size: int = 64
    most_launches: int = 448

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


CHATGLM3 = Setup(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    layers=28,
    query_heads=32,
    kv_heads=2,
    head_dim=128,
    pairs=32,
    batches=(1, 8, 32, 64, 128, 256, 512),
    contexts=(259, 512, 2048),
    prompts=(
        (1, 0, 259),
        (4, 0, 259),
        (16, 0, 259),
        (1, 0, 2051),
        (1, 1536, 512),
        (1, 5120, 1024),
        (4, 3072, 256),
    ),
    rotated=(1, 32, 256, 2048),
    decode_plans=(
        DecodePlan(tile=128, warps=4, stages=2, extra=132),
        DecodePlan(tile=64, warps=2, stages=2, extra=132),
        DecodePlan(tile=64, warps=4, stages=2, extra=132),
        DecodePlan(tile=128, warps=8, stages=2, extra=132),
    ),
    prefill_configs=(
        PrefillConfig(rows=64, keys=64, warps=4, stages=2),
        PrefillConfig(rows=64, keys=64, warps=4, stages=2, in_blocks=True),
        PrefillConfig(rows=128, keys=64, warps=4, stages=2, in_blocks=True),
        PrefillConfig(rows=128, keys=64, warps=4, stages=3, in_blocks=True),
        SPECIALISED,
    ),
)

TINY = replace(
    CHATGLM3,
    device=torch.device("cpu"),
    dtype=torch.float32,
    layers=2,
    query_heads=6,
    head_dim=16,
    pairs=4,
    batches=(1, 3),
    contexts=(40,),
    prompts=((1, 0, 20), (2, 17, 9)),
    rotated=(1, 5),
    decode_plans=(
        DecodePlan(tile=16, warps=4, stages=2, extra=4),
        DecodePlan(tile=32, warps=4, stages=2, extra=4),
    ),
    prefill_configs=(
        PrefillConfig(rows=16, keys=16, warps=4, stages=2),
        PrefillConfig(rows=16, keys=16, warps=4, stages=2, in_blocks=True),
    ),
    block_size=16,
    most_launches=4,
)
