"""How the decode attention is cut up, and what its programs leave for each other."""

import math
from dataclasses import dataclass

import torch

SEGMENTS = 32
"""The most segments a sequence is cut into; their number and bounds depend on its length alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the kernel is cut up. `tile` shapes the results, so a row repeats only under the same one.

    `tile`: keys loaded at once, a power of two of at least 16. `warps`, `stages`: as Triton's launch options
    `num_warps` and `num_stages`.
    """

    tile: int
    warps: int
    stages: int


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """Return the constants for a head's shape: 16 KiB of keys in a tile where a number has 16 bits.

    The pipeliner spends every other stage on the block numbers that the keys' addresses depend on, so five
    stages keep two tiles in flight. float32 has no matrix unit of its own precision: its tiles are small for
    the registers' sake.
    """
    narrow = dtype in (torch.float16, torch.bfloat16)
    tile = max(16, min(128, (16384 if narrow else 2048) // head_dim))
    return DecodeConfig(tile=tile, warps=4 if narrow else 8, stages=3)


class DecodeWorkspace:
    """What the programs of one sequence leave for the one that merges them; made once for all launches.

    Launches that share a workspace must not overlap: same stream, or ordered by events. It is not needed
    where a launch does not split. `rows`: the largest batch that is split.
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
        """Programs done so far; zero again when a launch ends."""

    def reset(self) -> None:
        """Make the workspace good again after a launch that failed midway."""
        self.arrivals.zero_()


def choose_splits(
    batch: int, kv_heads: int, sm_count: int, max_length: int, *, tile: int = 128, programs_per_sm: int = 1
) -> int:
    """Return how many programs should share a sequence: as many as it takes to fill the device, no more.

    Results do not depend on it (see `decode_attention`), only speed does, so it may differ between the
    graphs of different batch sizes. `max_length`: tokens of the longest sequence the launch will see;
    `programs_per_sm`: how many the device should have to choose from.
    """
    wanted = sm_count * programs_per_sm // (batch * kv_heads)
    tiles = math.ceil(max_length / tile)
    return max(1, min(wanted, tiles, SEGMENTS))


def padded_group(query_heads: int, kv_heads: int) -> int:
    """Return the rows of the matrix product: the query heads of a KV head, filled up to what a dot takes."""
    return max(16, 1 << (query_heads // kv_heads - 1).bit_length())
