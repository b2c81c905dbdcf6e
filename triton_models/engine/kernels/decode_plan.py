"""How decode attention divides its work, and the workspace its programs share."""

import math
from dataclasses import dataclass

import torch

SEGMENTS = 32
"""Most segments of a sequence; their number and bounds depend on its length alone."""

_SPLITS_BESIDE_PROMPTS = 4
"""Fewest splits in steps with prompts."""

_RESIDENT = 3
"""Programs with full tiles, 72 KiB of shared memory each, that a multiprocessor of a Hopper GPU holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the kernel divides its work. `tile` affects rounding, so results repeat only with the same one.

    `tile`: keys loaded at once, a power of two of at least 16. `warps`, `stages`: Triton's launch options
    `num_warps` and `num_stages`.
    """

    tile: int
    warps: int
    stages: int


def decode_config(head_dim: int, dtype: torch.dtype, *, crowded: bool = False) -> DecodeConfig:
    """Return the constants for a head's shape: 32 KiB of keys in a tile where a number has 16 bits.

    `crowded`: the device cannot hold all programs of the launch at once with such tiles. They are half as
    large then, and more of them run at the same time. No matrix unit has float32's precision, so its tiles
    are small, to fit the registers.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return DecodeConfig(tile=max(16, min(128, 2048 // head_dim)), warps=8, stages=3)
    tile = max(16, min(128, 16384 // head_dim))
    if crowded:
        return DecodeConfig(tile=max(16, tile // 2), warps=2, stages=2)
    return DecodeConfig(tile=tile, warps=4, stages=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """How one step's decodes are computed: programs per sequence and KV head, and the kernel's constants."""

    splits: int
    config: DecodeConfig


def plan_decode(
    batch: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    sm_count: int,
    max_length: int,
    beside_prompts: bool,
) -> DecodePlan:
    """Return how the decodes of a step are computed.

    With 16-bit numbers, rounding differs between large and small batches, as that of the products does.

    Args:
        batch: decodes of the step, with padding.
        kv_heads: number of KV heads.
        head_dim: width of a head.
        dtype: of the keys and values.
        sm_count: multiprocessors of the device.
        max_length: tokens of the longest sequence.
        beside_prompts: whether the step has prompts. Then most decodes of a captured one may be padding, and
            a few of them long.
    """
    splits = choose_splits(batch, kv_heads, sm_count, max_length)
    if beside_prompts:
        splits = max(splits, _SPLITS_BESIDE_PROMPTS)
    crowded = splits == 1 and batch * kv_heads > _RESIDENT * sm_count
    return DecodePlan(splits=splits, config=decode_config(head_dim, dtype, crowded=crowded))


class DecodeWorkspace:
    """Buffers in which a sequence's programs leave results for the one that merges them; made only once.

    Launches that share a workspace must not overlap: use one stream, or order them by events. Only launches
    that split need one. `rows`: the largest batch that is split.
    """

    def __init__(
        self, *, rows: int, query_heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.rows = rows
        lanes = padded_group(query_heads, kv_heads)
        self.sums = torch.empty(
            (rows, kv_heads, SEGMENTS, lanes, head_dim), dtype=torch.float32, device=device
        )
        """Unnormalised weighted sums of values: [rows, KV heads, segments, padded query heads, head_dim]."""
        self.scales = torch.empty((rows, kv_heads, SEGMENTS, 2, lanes), dtype=torch.float32, device=device)
        """Each segment's highest score, then its sum of weights."""
        self.arrivals = torch.zeros((rows, kv_heads), dtype=torch.int32, device=device)
        """Programs that have finished; zero again when a launch ends."""

    def reset(self) -> None:
        """Make the workspace usable again after a launch that failed midway."""
        self.arrivals.zero_()


def choose_splits(
    batch: int, kv_heads: int, sm_count: int, max_length: int, *, tile: int = 128, programs_per_sm: int = 1
) -> int:
    """Return how many programs should share a sequence: just enough to fill the device.

    It affects speed but not results (see `decode_attention`), so graphs of different batch sizes may differ
    in it. `max_length`: tokens of the longest sequence of the launch; `programs_per_sm`: how many programs to
    provide for each multiprocessor.
    """
    wanted = sm_count * programs_per_sm // (batch * kv_heads)
    tiles = math.ceil(max_length / tile)
    return max(1, min(wanted, tiles, SEGMENTS))


def padded_group(query_heads: int, kv_heads: int) -> int:
    """Return the rows of the matrix product: the query heads of a KV head, padded to what `dot` requires."""
    return max(16, 1 << (query_heads // kv_heads - 1).bit_length())
