"""Attention of prompts on Hopper GPUs, if it works where this runs."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from triton_models.engine.kernels.attention_prefill import (
    PrefillWorkspace,
    make_tiles,
    prefill_attention,
    prefill_config,
    queries_per_tile,
)
from triton_models.engine.models import CausalModel, ChunkRows, KVShape, Tile

log = logging.getLogger(__name__)

HOPPER_ROWS: Final = 480
"""Steps with more rows are for `HopperAttention`. This and the next are sizes of captured steps, so that
padding brings none beyond (`graphs.prompt_sizes`)."""

FEW_HOPPER_ROWS: Final = 64
"""So are steps with more rows than this if they have `StepLayout.many_keys` (bench/LOG.md, 2026-12-01)."""

_HOPPER = (9, 0)

_ROUNDS = 4
"""Most parts of tiles that a program may get."""

_LONG, _SHORT = 6000, 60
"""Tokens after which, and of which, prompts are when this is tried: some keys are divided."""

_FEW = 5
"""Programs of another trial."""

_TOLERANCE = 0.05
"""Of a token's two results in 16 bits: many times what rounding to bfloat16 takes."""


class HopperAttention:
    """Attention by `kernels.attention_hopper`, and the tiles for it.

    Launches must not overlap: use one stream, or order them by events.

    Args:
        query_heads: of queries; `attention_hopper.fits` says what is taken.
        kv: what is cached.
        programs: multiprocessors of the device.
        device: a Hopper GPU.

    Raises:
        ImportError: this version of Triton lacks something.
    """

    def __init__(self, query_heads: int, kv: KVShape, *, programs: int, device: torch.device) -> None:
        from triton_models.engine.kernels import attention_hopper  # noqa: PLC0415 - it may fail

        self._keys = attention_hopper.KEYS
        self._tile = queries_per_tile(query_heads, kv.heads, attention_hopper.TILE_ROWS)
        self._programs_of_head = max(1, programs // kv.heads)
        self._parts = PrefillWorkspace(
            places=_ROUNDS * self._programs_of_head,
            query_heads=query_heads,
            kv_heads=kv.heads,
            head_dim=kv.head_dim,
            rows=attention_hopper.TILE_ROWS,
            device=device,
        )
        self.attend = partial(attention_hopper.attend, workspace=self._parts, programs=programs)
        """Does what `prefill_attention` does, with its arguments but for the tiles, which are made here."""

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[Tile]:
        """Return the tiles of a step's chunks, whose keys are divided where that takes less time."""
        programs = self._programs_of_head
        return make_tiles(chunks, self._tile, keys=self._keys, programs=programs, rounds=_ROUNDS)

    def most_tiles(self, rows: int, chunks: int) -> int:
        """Return the most tiles: each chunk has at most one that it does not fill."""
        return rows // self._tile + chunks + self._parts.places

    def reset(self) -> None:
        """Zero the counters that a failed launch may have left."""
        self._parts.reset()


def hopper_attention(model: CausalModel, block_size: int, *, programs: int) -> HopperAttention | None:
    """Return what attends to prompts on a Hopper GPU; None if this is another, or it does not work here.

    The language that it is written in may change with Triton's version, so what it computes is compared.
    """
    kv, device = model.kv_shape, model.device
    if not _is_hopper(device):
        return None
    try:
        from triton_models.engine.kernels import attention_hopper  # noqa: PLC0415 - it may fail

        if not attention_hopper.fits(model.dtype, model.query_heads // kv.heads, kv.head_dim, block_size):
            return None
        attention = HopperAttention(model.query_heads, kv, programs=programs, device=device)
        _compare(attention, model, block_size)
    except Exception as error:  # noqa: BLE001 - of a compiler, of a launch, or a name that is gone
        log.warning("prompts get the slower attention, since the one for Hopper fails here: %s", error)
        return None
    return attention


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def _compare(attention: HopperAttention, model: CausalModel, block_size: int) -> None:
    """Raise ArithmeticError if prompts do not get what `prefill_attention` gives them."""
    kv, device = model.kv_shape, model.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=model.dtype, device=device)

    blocks = -(-(_LONG + _SHORT) // block_size)
    tables = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    keys, values = random(2, blocks, block_size, kv.heads, kv.head_dim)
    queries = random(2 * _SHORT, model.query_heads, kv.head_dim)
    chunks = [ChunkRows(0, 0, _SHORT, _LONG), ChunkRows(0, _SHORT, 2 * _SHORT, 0)]
    config = prefill_config(kv.head_dim, model.dtype, block_size=block_size)
    whole = make_tiles(chunks, queries_per_tile(model.query_heads, kv.heads, config.rows))
    slopes = torch.full((model.query_heads,), 0.01, device=device) if model.leans else None

    def attended(attend: Callable[..., None], tiles: list[Tile]) -> Tensor:
        out = torch.zeros_like(queries)
        numbers = torch.tensor(tiles, dtype=torch.int32, device=device)
        attend(queries, keys, values, tables, numbers, out, slopes=slopes)
        return out.double()

    expected = attended(partial(prefill_attention, config=config), whole)
    tiles = [*attention.tiles(chunks), Tile(0, 0, 0, 0)]
    # By all programs, and by few, each of which has many tiles.
    for attend in (attention.attend, partial(attention.attend, programs=_FEW)):
        # Token by token, since the average of many values is small.
        wrong = (attended(attend, tiles) - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
        if not wrong.max() < _TOLERANCE:
            raise ArithmeticError(f"its results are {wrong.max():.2g} off")
