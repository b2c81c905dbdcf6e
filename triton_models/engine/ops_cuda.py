"""A step's operations with our own GPU kernels; needs the `triton` package, which torch for CUDA installs."""

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from triton_models.engine.blocks import KVCache
from triton_models.engine.kernels.attention_decode import (
    DecodeWorkspace,
    NewTokens,
    decode_attention,
    plan_decode,
    share_out,
)
from triton_models.engine.kernels.attention_prefill import (
    make_tiles,
    prefill_attention,
    prefill_config,
    queries_per_tile,
)
from triton_models.engine.kernels.elementwise import gelu, rotate_store, swiglu
from triton_models.engine.kernels.elementwise import norm as norm_rows
from triton_models.engine.kernels.fp8 import MAX_ROWS as FP8_ROWS
from triton_models.engine.kernels.fp8 import (
    added_rows,
    fp8_linear,
    gated_rows,
    quantise_rows,
    scaled_product,
)
from triton_models.engine.kernels.linear import MAX_ROWS, linear, new_arrivals
from triton_models.engine.kernels.tiles import MAX_ROWS as TILED_ROWS
from triton_models.engine.kernels.tiles import TILE, TiledLinear, tiled_linear
from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, CausalModel, ChunkRows, Norm, Rotary, StepLayout
from triton_models.engine.quantised import Fp8Linear, QuantisedLinear

_FP8_MULTIPLE = 16
"""What the library's product of 8-bit numbers needs N and K to be a multiple of."""


class CudaOperations:
    """`StepOperations` of a model whose steps run one after the other on one stream."""

    clears_blocks = False

    def __init__(self, model: CausalModel, cache: KVCache, rows: int) -> None:
        kv = model.kv_shape
        self._cache = cache
        self._query_heads = model.query_heads
        self._kv_heads = kv.heads
        self._plan = plan_decode(kv.heads, kv.head_dim, model.dtype, sm_count=_sm_count(model.device))
        self._workspace = DecodeWorkspace(
            rows=rows,
            query_heads=model.query_heads,
            kv_heads=kv.heads,
            head_dim=kv.head_dim,
            device=model.device,
        )
        self._arrivals = new_arrivals(model.device)
        self._unit = torch.ones((), dtype=torch.float32, device=model.device)
        self._ahead: tuple[Tensor, Norm, tuple[Tensor, Tensor]] | None = None
        """Hidden states, and their norm in 8 bits, for the next product."""
        self._prefill = partial(prefill_config, kv.head_dim, model.dtype, block_size=cache.block_size)

    def begin(self, layout: StepLayout) -> None:
        """Divide the step's decodes among programs, as in all of its layers."""
        self._layout = layout
        self.positions = layout.positions
        self._positions = layout.positions.int()
        self._decodes = len(layout.decode_lengths)
        if self._decodes:
            self._items = share_out(layout.decode_lengths, layout.slots, self._plan)

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[tuple[int, int, int, int]]:
        """Divide chunks into the tiles of the prefill kernel."""
        return make_tiles(chunks, self._tile(chunks[-1].end)) if chunks else []

    def most_tiles(self, rows: int, chunks: int) -> int:
        """Return the most tiles: each chunk has at most one that it does not fill."""
        return rows // self._tile(rows) + chunks

    def _tile(self, rows: int) -> int:
        """Return how many tokens a tile has in a step of `rows` rows."""
        return queries_per_tile(self._query_heads, self._kv_heads, self._prefill(rows=rows))

    def reset(self) -> None:
        """Zero the counters that a failed launch may have left."""
        self._workspace.reset()
        self._arrivals.zero_()

    def attend(self, layer: int, projected: Tensor, rotary: Rotary | Alibi | None) -> Tensor:
        """Rotate, store and attend; see `Operations` for the shapes."""
        layout = self._layout
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        tables = layout.tables
        turns = rotary if isinstance(rotary, Rotary) else None
        slopes = rotary.slopes if isinstance(rotary, Alibi) else None
        queries = projected[:, : self._query_heads]
        attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        # Decodes without prompts beside them rotate and store on their own: a launch less in each layer.
        decodes: Tensor | NewTokens = NewTokens(projected, turns)
        if layout.tiles is not None:
            rotate_store(
                projected,
                turns.cos if turns else None,
                turns.sin if turns else None,
                self._positions,
                tables,
                layout.slots,
                keys,
                values,
                query_heads=self._query_heads,
            )
            decodes = queries[: self._decodes]
        if self._decodes:
            decode_attention(
                decodes,
                keys,
                values,
                tables,
                self._items,
                attended,
                plan=self._plan,
                workspace=self._workspace,
                slopes=slopes,
            )
        if layout.tiles is not None:
            config = self._prefill(rows=len(queries))
            prefill_attention(
                queries, keys, values, tables, layout.tiles, attended, config=config, slopes=slopes
            )
        return attended.flatten(1)

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [T, width], in one launch."""
        return _normed(hidden, norm)

    def linear(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return `matrix(inputs)`; few rows are limited by reading the weights, and get a kernel for that."""
        product = self._product(inputs, matrix, norm)
        return matrix(_normed(inputs, norm)) if product is None else product

    def add_linear(
        self, hidden: Tensor, inputs: Tensor, matrix: Linear, *, then: Norm | None = None
    ) -> Tensor:
        """Add `matrix(inputs)` to `hidden` in place, and return it."""
        if then is not None and _by_library(matrix, len(inputs)):
            return self._add_ahead(hidden, quantise_rows(inputs), matrix, then)
        if self._product(inputs, matrix, None, residual=hidden) is not None:
            return hidden
        if isinstance(matrix, QuantisedLinear | TiledLinear) or matrix.bias is not None:
            return hidden.add_(matrix(inputs))
        return torch.addmm(hidden, inputs, matrix.weight.T, out=hidden)

    def linear_swiglu(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return silu(first half) * second half of `matrix(inputs)`."""
        product = self._product(inputs, matrix, norm, gated=True)
        return swiglu(self.linear(inputs, matrix, norm=norm)) if product is None else product

    def linear_gelu(self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None) -> Tensor:
        """Return GELU of `matrix(inputs)`."""
        return gelu(self.linear(inputs, matrix, norm=norm))

    def feed_forward(
        self,
        hidden: Tensor,
        up: Linear,
        down: Linear,
        *,
        norm: Norm,
        gated: bool,
        add: bool,
        then: Norm | None = None,
    ) -> Tensor:
        """Return `down` of the activated `up` of the normed `hidden`, and add it to `hidden` if asked to."""
        if gated and _by_library(up, len(hidden)) and _by_library(down, len(hidden)):
            x = gated_rows(self._rounded(hidden, norm), up, unit=self._unit)
            if add and then is not None:
                return self._add_ahead(hidden, x, down, then)
            return scaled_product(x, down, unit=self._unit, residual=hidden if add else None)
        activated = (self.linear_swiglu if gated else self.linear_gelu)(hidden, up, norm=norm)
        if add:
            return self.add_linear(hidden, activated, down, then=then)
        return self.linear(activated, down)

    def _add_ahead(self, hidden: Tensor, x: tuple[Tensor, Tensor], matrix: Fp8Linear, then: Norm) -> Tensor:
        """Add a product to `hidden`, and round its norm in the same launch."""
        self._ahead = hidden, then, added_rows(x, matrix, unit=self._unit, residual=hidden, norm=then)
        return hidden

    def _rounded(self, inputs: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Return `quantise_rows(inputs, norm)`, which the operation before this one may have made."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is inputs and ahead[1] is norm:
            return ahead[2]
        return quantise_rows(inputs, norm)

    def _product(
        self,
        inputs: Tensor,
        matrix: Linear,
        norm: Norm | None,
        *,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor | None:
        """Return the product by a kernel of ours; None: it has none for so many rows, or such a matrix."""
        rows, arrivals = len(inputs), self._arrivals
        if isinstance(matrix, TiledLinear):
            if rows > TILED_ROWS or (gated and matrix.rows % (2 * TILE)):
                return None
            x = _normed(inputs, norm)
            return tiled_linear(x, matrix, arrivals=arrivals, residual=residual, gated=gated)
        if isinstance(matrix, Fp8Linear):
            return self._fp8_product(inputs, matrix, norm, residual, gated=gated)
        if rows > MAX_ROWS or isinstance(matrix, QuantisedLinear):
            return None
        x = _normed(inputs, norm)
        return linear(x, matrix.weight, matrix.bias, arrivals=arrivals, residual=residual, gated=gated)

    def _fp8_product(
        self, inputs: Tensor, matrix: Fp8Linear, norm: Norm | None, residual: Tensor | None, *, gated: bool
    ) -> Tensor | None:
        rows = len(inputs)
        if rows <= FP8_ROWS:
            x = quantise_rows(inputs, norm)
            return fp8_linear(x, matrix, arrivals=self._arrivals, residual=residual, gated=gated)
        if _by_library(matrix, rows):
            x = self._rounded(inputs, norm)
            return scaled_product(x, matrix, unit=self._unit, residual=residual, gated=gated)
        return None


def _by_library(matrix: Linear, rows: int) -> TypeGuard[Fp8Linear]:
    """Return whether the library multiplies so many rows in 8 bits."""
    if not isinstance(matrix, Fp8Linear) or rows <= FP8_ROWS:
        return False
    return not (len(matrix.weight) % _FP8_MULTIPLE or matrix.columns % _FP8_MULTIPLE)


def _normed(inputs: Tensor, norm: Norm | None) -> Tensor:
    return inputs if norm is None else norm_rows(inputs, norm.weight, norm.epsilon, norm.bias)


def _sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where kernels are interpreted on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
