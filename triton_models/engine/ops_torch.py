"""A step's operations in plain torch, for any device: paged attention, norms and products.

On a CPU, each call of a torch operator costs as much as a small product, so there are few calls: a rotation
is one product of complex numbers, and a norm combines its operations as far as possible.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from triton_models.engine.blocks import KVCache
from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, CausalModel, ChunkRows, Next, Norm, Rotary, StepLayout, Tile

_BIASES = 2**24
"""Most biases of a prompt's scores that exist at once: 64 MiB in float32."""


class PlainMath:
    """The `Operations` but for the attention: for any device, and differentiable."""

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [T, width], computed in float32."""
        numbers, weight = hidden.float(), norm.weight
        if norm.bias is not None:
            return layer_norm(numbers, weight.shape, weight, norm.bias, norm.epsilon).to(hidden.dtype)
        length: Tensor = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
        # The mean square is the squared length over the width.
        epsilon = _scalar(norm.epsilon, hidden.device)
        scale = torch.addcmul(epsilon, length, length, value=1 / hidden.shape[-1])
        return (numbers * scale.rsqrt_()).mul_(weight).to(hidden.dtype)

    def linear(
        self,
        inputs: Tensor,
        matrix: Linear,
        *,
        norm: Norm | None = None,
        attends: bool = False,  # noqa: ARG002 - nothing is left to attention
    ) -> Tensor:
        """Return `matrix(inputs)`."""
        return matrix(inputs if norm is None else self.norm(inputs, norm))

    def add_linear(
        self,
        hidden: Tensor,
        inputs: Tensor,
        matrix: Linear,
        *,
        then: Next | None = None,  # noqa: ARG002 - nothing is done ahead
    ) -> Tensor:
        """Return `hidden + matrix(inputs)`."""
        return matrix.add(hidden, inputs)

    def linear_swiglu(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return silu(first half) * second half of `matrix(inputs)`."""
        gate, up = self.linear(inputs, matrix, norm=norm).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def linear_gelu(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return GELU of `matrix(inputs)`, in its form with tanh."""
        return gelu(self.linear(inputs, matrix, norm=norm), approximate="tanh")

    def feed_forward(
        self,
        hidden: Tensor,
        up: Linear,
        down: Linear,
        *,
        norm: Norm,
        gated: bool,
        add: bool,
        then: Next | None = None,  # noqa: ARG002 - as above
    ) -> Tensor:
        """Return `down` of the activated `up` of the normed `hidden`, and add it to `hidden` if asked to."""
        activated = (self.linear_swiglu if gated else self.linear_gelu)(hidden, up, norm=norm)
        return self.add_linear(hidden, activated, down) if add else self.linear(activated, down)


class HostOperations(PlainMath):
    """What `StepOperations` without kernels of a GPU have in common: no tiles from the host, and no state."""

    many_keys_rows = 0

    def tiles(self, chunks: Sequence[ChunkRows]) -> tuple[list[Tile], bool]:  # noqa: ARG002 - it has none
        """Return none, since chunks are not divided."""
        return [], False

    def most_tiles(self, rows: int, chunks: int, *, many_keys: bool) -> int:  # noqa: ARG002 - it has none
        """Return 0, since chunks are not divided."""
        return 0

    def reset(self) -> None:
        """Do nothing: steps share no state."""


class TorchOperations(HostOperations):
    """`StepOperations` over the flattened tokens of a step.

    What all layers share (rotations, masks, block tables) is built once per step, but for the biases of
    prompts, which would take too much memory. Query heads that share a KV head form one SDPA batch, so keys
    and values are never repeated in memory.
    """

    clears_blocks = True

    def __init__(self, model: CausalModel, cache: KVCache, rows: int) -> None:  # noqa: ARG002 - kernels need all
        self._cache = cache

    def begin(self, layout: StepLayout) -> None:
        """Build what the layers of a step share."""
        self._layout = layout
        self.positions = layout.positions
        size = self._cache.block_size
        # Each layer's blocks, and its places one after the other.
        self._keys, self._values = self._cache.keys.unbind(), self._cache.values.unbind()
        self._key_places = self._cache.keys.flatten(1, 2).unbind()
        self._value_places = self._cache.values.flatten(1, 2).unbind()
        blocks = layout.tables[layout.slots, layout.positions // size].long()
        self._places = blocks * size + layout.positions % size
        self._turns: Tensor | None = None
        self._decode_biases: Tensor | None = None
        self._decodes = len(layout.decode_lengths)
        if self._decodes:
            width = -(-layout.longest_decode // size)
            self._decode_blocks = layout.tables[layout.slots[: self._decodes], :width].long()
            self._decode_mask = self._build_decode_mask()
        self._chunks = [
            (
                chunk,
                layout.tables[chunk.slot, : -(-chunk.length // size)].long(),
                self._build_chunk_mask(chunk),
            )
            for chunk in layout.chunks
        ]

    def attend(
        self,
        layer: int,
        projected: Tensor,
        rotary: Rotary | Alibi | None,
        *,
        then: Next | None = None,  # noqa: ARG002 - nothing is done ahead
    ) -> Tensor:
        """Rotate, store and attend; see `Operations` for the shapes."""
        cached_keys, cached_values = self._keys[layer], self._values[layer]
        kv_heads = cached_keys.shape[2]
        alibi = rotary if isinstance(rotary, Alibi) else None
        if isinstance(rotary, Rotary):
            if self._turns is None:
                self._turns = rotation(rotary, self.positions)
            # Queries and keys stand side by side, so one rotation serves both.
            rotate_in_place(projected[:, :-kv_heads], self._turns)
        queries, keys, values = split_heads(projected, kv_heads)
        self._key_places[layer].index_copy_(0, self._places, keys)
        self._value_places[layer].index_copy_(0, self._places, values)
        parts = []
        if self._decodes:
            parts.append(self._decode(queries[: self._decodes], cached_keys, cached_values, alibi))
        for chunk, blocks, mask in self._chunks:
            rows = queries[chunk.start : chunk.end]
            past = cached_keys.index_select(0, blocks), cached_values.index_select(0, blocks)
            parts.append(_prefill(rows, chunk.length, mask, *past, alibi=alibi))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.flatten(1)

    def _decode(
        self, queries: Tensor, cached_keys: Tensor, cached_values: Tensor, alibi: Alibi | None
    ) -> Tensor:
        """Attend with one token per sequence, all sequences at once, over padded copies of their blocks."""
        rows, heads, head_dim = queries.shape
        kv_heads = cached_keys.shape[2]
        shape = (rows, -1, kv_heads, head_dim)
        blocks = self._decode_blocks.flatten()
        keys = cached_keys.index_select(0, blocks).view(shape).transpose(1, 2)
        values = cached_values.index_select(0, blocks).view(shape).transpose(1, 2)
        # The query heads that share a KV head form SDPA's query axis: [D, KV heads, shared, head_dim].
        grouped = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        mask = self._decode_mask
        if alibi is not None:
            if self._decode_biases is None:
                self._decode_biases = self._build_decode_biases(alibi, kv_heads)
            mask = self._decode_biases
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)

    def _build_decode_mask(self) -> Tensor:
        """Return the additive mask [D, 1, 1, padded length]."""
        lengths = self._layout.decode_lengths
        padded = self._decode_blocks.shape[1] * self._cache.block_size
        beyond = torch.arange(padded, device=lengths.device) >= lengths[:, None]
        return self._additive(beyond)[:, None, None, :]

    def _build_decode_biases(self, alibi: Alibi, kv_heads: int) -> Tensor:
        """Return the biases [D, KV heads, shared, padded length]."""
        padded = self._decode_blocks.shape[1] * self._cache.block_size
        biases = _biases(alibi, self._layout.decode_lengths - 1, padded, self._cache.keys.dtype)
        return biases.transpose(0, 1).reshape(self._decodes, kv_heads, -1, padded)

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


def _prefill(
    queries: Tensor, length: int, mask: Tensor | None, keys: Tensor, values: Tensor, *, alibi: Alibi | None
) -> Tensor:
    """Attend causally with the new tokens of one sequence to all of its tokens.

    Args:
        queries: [new tokens, heads, head_dim].
        length: number of tokens in the sequence, including the new ones.
        mask: additive, [new tokens, length]; None for causal.
        keys: [blocks, block_size, KV heads, head_dim], copied from the sequence's blocks.
        values: the same shape as `keys`.
        alibi: its biases take the mask's place, some query rows at a time.

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
    keys, values = expand(keys), expand(values)
    if alibi is None:
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    else:
        parts, step = [], max(1, _BIASES // (heads * length))
        for start in range(0, count, step):
            positions = torch.arange(length - count + start, length, device=queries.device)[:step]
            biases = _biases(alibi, positions, length, keys.dtype).view(kv_heads, shared, -1, length)
            rows = grouped[:, :, start : start + step]
            parts.append(scaled_dot_product_attention(rows, keys, values, attn_mask=biases))
        attended = torch.cat(parts, dim=2)
    return attended.permute(2, 0, 1, 3).reshape(queries.shape)


def _biases(alibi: Alibi, positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of queries at `positions`, [Q]: [heads, Q, length].

    Later keys than a query's have -inf.
    """
    distances = torch.arange(length, device=positions.device) - positions[:, None]
    biases = alibi.slopes[:, None, None] * distances
    return biases.masked_fill_(distances > 0, -torch.inf).to(dtype)


def rotation(rotary: Rotary, positions: Tensor) -> Tensor:
    """Return the complex numbers that turn the pairs at `positions` ([T]): [T, 1, pairs] complex64."""
    return torch.complex(rotary.cos[positions, None, :], rotary.sin[positions, None, :])


def rotate_in_place(heads: Tensor, turns: Tensor) -> None:
    """Rotate the first `2 * pairs` numbers of each head in place, in float32; a pair is a complex number.

    Args:
        heads: [T, heads, head_dim], changed; differentiable.
        turns: from `rotation`.
    """
    count = turns.shape[-1]
    pairs = heads[..., : 2 * count].view(*heads.shape[:-1], count, 2)
    numbers = pairs.float()
    torch.view_as_complex(numbers).mul_(turns)
    if numbers is not pairs:
        pairs.copy_(numbers)


def split_heads(projected: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the queries, keys and values in `projected`."""
    queries = projected.shape[1] - 2 * kv_heads
    # Not `split`, which is a function of Python's around this.
    parts = projected.split_with_sizes([queries, kv_heads, kv_heads], dim=1)
    return parts[0], parts[1], parts[2]


@cache
def _scalar(number: float, device: torch.device) -> Tensor:
    return torch.tensor(number, device=device)
