"""Paged attention for the flattened tokens of a step, in plain torch: the same code on CPU and CUDA."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triton_models.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several new tokens of one sequence: rows `start` to `end` of the step, positions `offset` onwards.

    `blocks`: [B] int64, the blocks that hold the sequence up to the chunk's end.
    """

    start: int
    end: int
    offset: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which token of a step belongs to which sequence.

    The first rows are the decodes, one token of one sequence each; chunks follow. `slots`: [T] int64, where
    each token's keys and values go, as block * block_size + place. `decode_blocks`: [D, B] int64, padded with
    the padding block; `decode_lengths`: [D] int64, tokens of each sequence with the new one.
    """

    slots: Tensor
    decode_blocks: Tensor
    decode_lengths: Tensor
    chunks: tuple[PrefillChunk, ...]


class PagedAttention:
    """One step's attention; an `Attention` for the model.

    Masks are built once and shared by all layers. Query heads that share a KV head become one batch of
    SDPA, so that keys and values are never repeated in memory.
    """

    def __init__(self, cache: KVCache, layout: StepLayout) -> None:
        self._cache = cache
        self._layout = layout
        self._decodes = layout.decode_lengths.shape[0]
        self._decode_mask = self._build_decode_mask() if self._decodes else None
        self._chunk_masks = [self._build_chunk_mask(chunk) for chunk in layout.chunks]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `Attention`."""
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        cached_keys.flatten(0, 1).index_copy_(0, self._layout.slots, keys)
        cached_values.flatten(0, 1).index_copy_(0, self._layout.slots, values)
        parts = []
        if self._decodes:
            parts.append(self._decode(queries[: self._decodes], cached_keys, cached_values))
        for chunk, mask in zip(self._layout.chunks, self._chunk_masks, strict=True):
            parts.append(_prefill(queries[chunk.start : chunk.end], chunk, mask, cached_keys, cached_values))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, queries: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        """Attend one token per sequence, all sequences at once, over padded copies of their blocks."""
        table = self._layout.decode_blocks
        rows, heads, head_dim = queries.shape
        kv_heads = cached_keys.shape[2]
        shape = (rows, -1, kv_heads, head_dim)
        keys = cached_keys.index_select(0, table.flatten()).view(shape).transpose(1, 2)
        values = cached_values.index_select(0, table.flatten()).view(shape).transpose(1, 2)
        # The heads that share a KV head stand where a sequence of queries would: [D, KV heads, shared,
        # head_dim].
        grouped = queries.view(rows, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=self._decode_mask).reshape(
            queries.shape
        )

    def _build_decode_mask(self) -> Tensor:
        """Return the additive mask [D, 1, 1, padded length]."""
        lengths = self._layout.decode_lengths
        padded = self._layout.decode_blocks.shape[1] * self._cache.block_size
        beyond = torch.arange(padded, device=lengths.device) >= lengths[:, None]
        return self._additive(beyond)[:, None, None, :]

    def _build_chunk_mask(self, chunk: PrefillChunk) -> Tensor | None:
        """Return the additive mask [new tokens, tokens so far]; None where plain causal attention does."""
        if chunk.offset == 0:
            return None
        length = chunk.offset + chunk.end - chunk.start
        device = chunk.blocks.device
        positions = torch.arange(chunk.offset, length, device=device)
        return self._additive(torch.arange(length, device=device) > positions[:, None])

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._cache.keys.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -torch.inf)


def _prefill(
    queries: Tensor, chunk: PrefillChunk, mask: Tensor | None, cached_keys: Tensor, cached_values: Tensor
) -> Tensor:
    """Attend the new tokens of one sequence over all of it."""
    count, heads, head_dim = queries.shape
    kv_heads = cached_keys.shape[2]
    shared = heads // kv_heads
    length = chunk.offset + count

    def expand(cached: Tensor) -> Tensor:
        flat = cached.index_select(0, chunk.blocks).flatten(0, 1)[:length]
        return flat.transpose(0, 1)[:, None].expand(kv_heads, shared, length, head_dim)

    # KV heads are the batch, the query heads of each its heads: [KV heads, shared, tokens, head_dim].
    grouped = queries.view(count, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(
        grouped, expand(cached_keys), expand(cached_values), attn_mask=mask, is_causal=mask is None
    )
    return attended.permute(2, 0, 1, 3).reshape(queries.shape)
