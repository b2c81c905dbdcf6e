"""The data on which the attention kernels are checked and timed: a random paged cache, and steps over it."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.attention_setup import Setup
from bench.gpu.timing import Launch
from triton_models.engine.kernels.attention_decode import (
    DecodePlan,
    DecodeWorkspace,
    decode_attention,
    share_out,
)
from triton_models.engine.kernels.attention_prefill import (
    PrefillConfig,
    make_tiles,
    prefill_attention,
    queries_per_tile,
)
from triton_models.engine.kernels.elementwise import rotate_store
from triton_models.engine.models import ChunkRows, KVShape
from triton_models.engine.ops_hopper import HopperAttention

FLUSH_BYTES = 2**28
"""Several times a Hopper's L2 cache."""


class Cache:
    """A random cache for all layers, with NaN in the last block; block tables take random other blocks."""

    def __init__(self, setup: Setup, blocks: int) -> None:
        size = (setup.layers, blocks, setup.block_size, setup.kv_heads, setup.head_dim)
        self.keys = torch.empty(size, dtype=setup.dtype, device=setup.device).normal_()
        self.values = torch.empty_like(self.keys).normal_()
        self.keys[:, -1] = torch.nan
        self.values[:, -1] = torch.nan
        self.blocks = blocks

    def tables(self, sequences: int, width: int) -> Tensor:
        """Return int32 [sequences, width + 1] of different blocks; the last column is the block with NaN."""
        device = self.keys.device
        blocks = torch.randperm(self.blocks - 1, device=device)[: sequences * width].view(sequences, width)
        invalid = torch.full((sequences, 1), self.blocks - 1, device=device)
        return torch.cat([blocks, invalid], 1).int()


def integers(setup: Setup, numbers: Iterable[int]) -> Tensor:
    """Return the numbers as an int32 tensor on the device."""
    return torch.tensor(list(numbers), dtype=torch.int32, device=setup.device)


def direct(setup: Setup, cache: Cache, table: Tensor, queries: Tensor, offset: int) -> Tensor:
    """Return the attention of the queries of one sequence in layer 0, computed in float64."""
    length = offset + len(queries)
    blocks = table[: -(-length // setup.block_size)].long()
    group = setup.query_heads // setup.kv_heads
    keys, values = (
        each[0, blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        for each in (cache.keys, cache.values)
    )
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * setup.head_dim**-0.5
    positions = torch.arange(length, device=setup.device)
    hidden = positions[None] > positions[offset:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error by norms; NaN if either tensor contains NaN."""
    return float((actual.double() - expected).norm() / expected.norm())


class Decode:
    """Decode steps over all layers for several sets of sequences, each set with the same `lengths`."""

    def __init__(self, setup: Setup, cache: Cache, lengths: list[int]) -> None:
        batch = len(lengths)
        width = -(-max(lengths) // setup.block_size)
        flushed = FLUSH_BYTES // (setup.token_bytes * sum(lengths) * setup.layers) + 1
        self.sets = min(flushed, setup.most_launches // setup.layers, (cache.blocks - 1) // (batch * width))
        self.device = setup.device
        self._setup, self._cache = setup, cache
        self._shape = (batch, setup.query_heads, setup.head_dim)
        self.queries = torch.empty(self._shape, dtype=setup.dtype, device=setup.device).normal_()
        self.out = torch.full_like(self.queries, torch.nan)
        self.tables = cache.tables(self.sets * batch, width)
        self._rows = [integers(setup, range(at * batch, (at + 1) * batch)) for at in range(self.sets)]
        self._lengths = integers(setup, lengths)

    def launches(self, plan: DecodePlan) -> list[Launch]:
        """Return one launch per layer and set; what all layers share is made before them."""
        setup, cache = self._setup, self._cache
        workspace = workspace_for(setup, self._shape[0])

        def launch(layer: int, items: Tensor) -> None:
            decode_attention(
                self.queries, cache.keys[layer], cache.values[layer], self.tables, items, self.out,
                plan=plan, workspace=workspace,
            )  # fmt: skip

        shared = [share_out(self._lengths, rows, plan) for rows in self._rows]
        return [partial(launch, layer, items) for items in shared for layer in range(setup.layers)]


def workspace_for(setup: Setup, rows: int) -> DecodeWorkspace:
    """Return a workspace of this size."""
    return DecodeWorkspace(
        rows=rows,
        query_heads=setup.query_heads,
        kv_heads=setup.kv_heads,
        head_dim=setup.head_dim,
        device=setup.device,
    )


def check_decode(setup: Setup, cache: Cache, plan: DecodePlan) -> str:
    """Compare with float64, however the sequences are divided."""
    longest = max(setup.contexts)
    lengths = [1, 15, 16, 17, 33, longest // 2 + 3, longest]
    step = Decode(setup, cache, lengths)
    expected = torch.cat(
        [
            direct(setup, cache, step.tables[row], step.queries[row, None], length - 1)
            for row, length in enumerate(lengths)
        ]
    )
    errors = []
    for extra in (1, 2, 3, 8, 32, 200, None):
        step.out.fill_(torch.nan)
        step.launches(replace(plan, extra=extra))[0]()
        errors.append(error(step.out, expected))
    # Not `max` of a list, which may miss a NaN.
    return f"error {float(torch.tensor(errors).max()):.2e}"


class Prefill:
    """Prefill of the prompts of some sequences, over all layers."""

    def __init__(self, setup: Setup, cache: Cache, case: tuple[int, int, int]) -> None:
        sequences, self.offset, self.count = case
        self.device = setup.device
        self._setup, self._cache = setup, cache
        self.tables = cache.tables(sequences, -(-(self.offset + self.count) // setup.block_size))
        self._chunks = [
            ChunkRows(row, row * self.count, (row + 1) * self.count, self.offset) for row in range(sequences)
        ]
        shape = (sequences * self.count, setup.query_heads, setup.head_dim)
        self.queries = torch.empty(shape, dtype=setup.dtype, device=setup.device).normal_()
        self.out = torch.full_like(self.queries, torch.nan)

    def launches(self, config: PrefillConfig | str) -> list[Launch]:
        """Return one launch per layer."""
        setup, cache = self._setup, self._cache
        if isinstance(config, str):
            count = torch.cuda.get_device_properties(self.device).multi_processor_count
            shape = KVShape(layers=setup.layers, heads=setup.kv_heads, head_dim=setup.head_dim)
            hopper = HopperAttention(setup.query_heads, shape, programs=count, device=self.device)
            made, attend = hopper.tiles(self._chunks), hopper.attend
        else:
            tile = queries_per_tile(setup.query_heads, setup.kv_heads, config.rows)
            made, attend = make_tiles(self._chunks, tile), partial(prefill_attention, config=config)
        tiles = torch.tensor(made, dtype=torch.int32, device=setup.device)

        def launch(layer: int) -> None:
            attend(self.queries, cache.keys[layer], cache.values[layer], self.tables, tiles, self.out)

        return [partial(launch, layer) for layer in range(setup.layers)]


def check_prefill(setup: Setup, cache: Cache, config: PrefillConfig | str) -> str:
    """Compare the last sequence of each case with float64, and look for NaN in all."""
    errors = []
    for case in setup.prompts:
        step = Prefill(setup, cache, case)
        step.launches(config)[0]()
        last = (case[0] - 1) * step.count
        expected = direct(setup, cache, step.tables[-1], step.queries[last:], step.offset)
        errors.append(error(step.out[last:], expected))
        if step.out.isnan().any():
            return f"NaN in {case}"
    return f"error {max(errors):.2e}"


class Rotation:
    """Rotation and storing of the tokens of one sequence over all layers, from position 5."""

    def __init__(self, setup: Setup, cache: Cache, tokens: int) -> None:
        self.device = setup.device
        self._setup, self._cache = setup, cache
        heads = setup.query_heads + 2 * setup.kv_heads
        shape = (setup.layers, tokens, heads, setup.head_dim)
        self.projected = torch.empty(shape, dtype=setup.dtype, device=setup.device).normal_()
        self.positions = torch.arange(5, tokens + 5, device=setup.device)
        angles = torch.rand(tokens + 5, setup.pairs, device=setup.device) * 100
        self.cos, self.sin = angles.cos(), angles.sin()
        self.tables = cache.tables(1, (tokens + 5) // setup.block_size + 1)
        self._rows = integers(setup, [0] * tokens)
        # Everything is read; the queries' rotated numbers and the keys and values are written, too.
        rotated = setup.query_heads * 2 * setup.pairs + 2 * setup.kv_heads * setup.head_dim
        self.bytes = tokens * (heads * setup.head_dim + rotated) * setup.dtype.itemsize

    def launches(self) -> list[Launch]:
        """Return one launch per layer."""
        setup, cache = self._setup, self._cache
        positions = self.positions.int()

        def launch(layer: int) -> None:
            rotate_store(
                self.projected[layer], self.cos, self.sin, positions, self.tables, self._rows,
                cache.keys[layer], cache.values[layer], query_heads=setup.query_heads,
            )  # fmt: skip

        return [partial(launch, layer) for layer in range(setup.layers)]


def check_rotation(setup: Setup, cache: Cache) -> str:
    """Compare the results bitwise with the definition's."""
    step = Rotation(setup, cache, max(setup.rotated))
    expected = step.projected[0].clone()
    cos, sin = (each[step.positions, None, :] for each in (step.cos, step.sin))
    rotary = expected[:, : -setup.kv_heads, : 2 * cos.shape[-1]]
    even, odd = rotary[..., 0::2].float(), rotary[..., 1::2].float()
    # Each product and sum rounded by itself, as in the kernel.
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    rotary.copy_(rotated.flatten(-2))
    step.launches()[0]()
    blocks = step.tables[0, step.positions // setup.block_size].long()
    places = blocks * setup.block_size + step.positions % setup.block_size
    keys = expected[:, setup.query_heads : -setup.kv_heads]
    right = (
        torch.equal(step.projected[0, :, : setup.query_heads], expected[:, : setup.query_heads])
        and torch.equal(cache.keys[0].flatten(0, 1)[places], keys)
        and torch.equal(cache.values[0].flatten(0, 1)[places], expected[:, -setup.kv_heads :])
    )
    return "bits equal" if right else "bits DIFFER"


def compile_kernel(setup: Setup, what: DecodePlan | PrefillConfig | str | None) -> None:
    """Launch one kernel on little data, to fill the compiler's cache."""
    cache = Cache(setup, 64)
    if isinstance(what, DecodePlan):
        Decode(setup, cache, [20]).launches(what)[0]()
    elif what is not None:
        Prefill(setup, cache, (1, 0, 20)).launches(what)[0]()
    else:
        Rotation(setup, cache, 1).launches()[0]()
