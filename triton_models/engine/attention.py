"""Paged attention over the flattened tokens of a step, in plain torch: the same code for CPU and CUDA."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import ChunkRows, StepLayout
from triton_models.engine.operations import PlainMath, Rotary, rotate_in_place, rotation, split_heads


class PlainOperations(PlainMath):
    """One step's `Operations`.

    What all layers share (rotations, masks, block tables) is built once per step. Query heads that share a KV
    head form one SDPA batch, so keys and values are never repeated in memory.
    """

    def __init__(self, cache: KVCache, layout: StepLayout) -> None:
        self._cache = cache
        self._layout = layout
        self.positions = layout.positions
        size = cache.block_size
        places = layout.positions // size
        blocks = layout.tables[layout.slots, places].long()
        self._places = blocks * size + layout.positions % size
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._decodes = len(layout.decode_lengths)
        if self._decodes:
            width = -(-layout.longest_decode // size)
            self._decode_blocks = layout.tables[layout.slots[: self._decodes], :width].long()
            self._decode_mask = self._build_decode_mask()
        self._chunk_blocks = [
            layout.tables[chunk.slot, : -(-chunk.length // size)].long() for chunk in layout.chunks
        ]
        self._chunk_masks = [self._build_chunk_mask(chunk) for chunk in layout.chunks]

    def attend(self, layer: int, projected: Tensor, rotary: Rotary) -> Tensor:
        """See `Operations`."""
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        kv_heads = cached_keys.shape[2]
        # Queries and keys stand side by side, so one rotation serves both.
        self._rotate(projected[:, :-kv_heads], rotary)
        queries, keys, values = split_heads(projected, kv_heads)
        cached_keys.flatten(0, 1).index_copy_(0, self._places, keys)
        cached_values.flatten(0, 1).index_copy_(0, self._places, values)
        parts = []
        if self._decodes:
            parts.append(self._decode(queries[: self._decodes], cached_keys, cached_values))
        for chunk, blocks, mask in zip(
            self._layout.chunks, self._chunk_blocks, self._chunk_masks, strict=True
        ):
            rows = queries[chunk.start : chunk.end]
            past = cached_keys.index_select(0, blocks), cached_values.index_select(0, blocks)
            parts.append(_prefill(rows, chunk.length, mask, *past))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.flatten(1)

    def _rotate(self, heads: Tensor, rotary: Rotary) -> None:
        if self._rotation is None:
            self._rotation = rotation(rotary, self.positions)
        rotate_in_place(heads, *self._rotation)

    def _decode(self, queries: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        """Attend with one token per sequence, all sequences at once, over padded copies of their blocks."""
        rows, heads, head_dim = queries.shape
        kv_heads = cached_keys.shape[2]
        shape = (rows, -1, kv_heads, head_dim)
        blocks = self._decode_blocks.flatten()
        keys = cached_keys.index_select(0, blocks).view(shape).transpose(1, 2)
        values = cached_values.index_select(0, blocks).view(shape).transpose(1, 2)
        # The query heads that share a KV head form SDPA's query axis: [D, KV heads, shared, head_dim].
        grouped = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=self._decode_mask).reshape(
            queries.shape
        )

    def _build_decode_mask(self) -> Tensor:
        """Return the additive mask [D, 1, 1, padded length]."""
        lengths = self._layout.decode_lengths
        padded = self._decode_blocks.shape[1] * self._cache.block_size
        beyond = torch.arange(padded, device=lengths.device) >= lengths[:, None]
        return self._additive(beyond)[:, None, None, :]

    def _build_chunk_mask(self, chunk: ChunkRows) -> Tensor | None:
        """Return the additive mask [new tokens, tokens so far]; None if plain causal attention suffices."""
        if chunk.offset == 0:
            return None
        device = self.positions.device
        positions = torch.arange(chunk.offset, chunk.length, device=device)
        return self._additive(torch.arange(chunk.length, device=device) > positions[:, None])

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._cache.keys.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -torch.inf)


def _prefill(queries: Tensor, length: int, mask: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
    """Attend causally with the new tokens of one sequence to all of its tokens.

    Args:
        queries: [new tokens, heads, head_dim].
        length: number of tokens in the sequence, including the new ones.
        mask: additive, [new tokens, length]; None for causal.
        keys: [blocks, block_size, KV heads, head_dim], copied from the sequence's blocks.
        values: the same shape as `keys`.

    Returns:
        [new tokens, heads, head_dim].
    """
    count, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads

    def expand(cached: Tensor) -> Tensor:
        flat = cached.flatten(0, 1)[:length]
        return flat.transpose(0, 1)[:, None].expand(kv_heads, shared, length, head_dim)

    # The batch is the KV heads, each with the query heads it serves: [KV heads, shared, tokens, head_dim].
    grouped = queries.reshape(count, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(
        grouped, expand(keys), expand(values), attn_mask=mask, is_causal=mask is None
    )
    return attended.permute(2, 0, 1, 3).reshape(queries.shape)
