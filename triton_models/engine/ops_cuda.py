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
    FEW_ROWS,
    MANY_KEYS,
    make_tiles,
    prefill_attention,
    prefill_config,
    prefill_workspace,
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
    unscaled_product,
)
from triton_models.engine.kernels.heads import SCALED, Scales, padded
from triton_models.engine.kernels.linear import MAX_ROWS, leaves_rows, linear, new_arrivals, tiling_for
from triton_models.engine.kernels.rows import BLOCK, MARKED_ROWS, SCALED_BLOCK, Rows, new_marks, prepare
from triton_models.engine.kernels.tiles import MAX_ROWS as TILED_ROWS
from triton_models.engine.kernels.tiles import TILE, TiledLinear, takes_sums, tiled_linear
from triton_models.engine.linear import Linear
from triton_models.engine.models import (
    Alibi,
    CausalModel,
    ChunkRows,
    Next,
    Norm,
    Rotary,
    StepLayout,
    Tile,
)
from triton_models.engine.ops_hopper import (
    FEW_HOPPER_ROWS,
    HOPPER_ROWS,
    HopperAttention,
    hopper_attention,
)
from triton_models.engine.quantised import Fp8Linear, QuantisedLinear

_FP8_MULTIPLE = 16
"""What the library's product of 8-bit numbers needs N and K to be a multiple of."""


_Ahead = Rows | tuple[Tensor, Tensor]
"""What goes into a product, if not its inputs as they are; in 8 bits, numbers and scales."""


class CudaOperations:
    """`StepOperations` of a model whose steps run one after the other on one stream."""

    clears_blocks = False

    def __init__(self, model: CausalModel, cache: KVCache, rows: int) -> None:
        kv = model.kv_shape
        self._cache = cache
        self._dtype = model.dtype
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
        self._ahead: tuple[Tensor, Norm | None, _Ahead] | None = None
        """A result, and it or its norm as the next product takes it."""
        self._scales: Scales = SCALED
        """What attention is to do to the latest product that goes into it."""
        self._hopper = hopper_attention(model, cache.block_size, programs=_sm_count(model.device))
        self._prefill = partial(prefill_config, kv.head_dim, model.dtype, block_size=cache.block_size)
        self._prefill_parts = prefill_workspace(
            model.query_heads,
            kv.heads,
            kv.head_dim,
            model.dtype,
            sm_count=_sm_count(model.device),
            device=model.device,
        )

    def begin(self, layout: StepLayout) -> None:
        """Divide the step's decodes among programs, as in all of its layers."""
        self._layout, self._ahead, self._scales = layout, None, SCALED
        self.positions = layout.positions
        self._positions = layout.positions.int()
        self._decodes = len(layout.decode_lengths)
        if self._decodes:
            self._items = share_out(layout.decode_lengths, layout.slots, self._plan)

    def tiles(self, chunks: Sequence[ChunkRows]) -> tuple[list[Tile], bool]:
        """Divide chunks into the tiles of the kernel that suits them."""
        if not chunks:
            return [], False
        rows = chunks[-1].end
        many_keys = rows <= self.many_keys_rows and max(chunk.length for chunk in chunks) > MANY_KEYS
        if hopper := self._hopper_for(rows, many_keys=many_keys):
            return hopper.tiles(chunks), many_keys
        parts = self._prefill_parts if many_keys else None
        keys, programs = self._prefill(rows=rows).keys, parts.places if parts is not None else 0
        tiles = make_tiles(chunks, self._tile(rows), keys=keys, programs=programs)
        # A kernel that can merge parts takes a little longer where there are none.
        return tiles, any(tile.parts > 1 for tile in tiles)

    @property
    def many_keys_rows(self) -> int:
        """Steps with more rows have tiles enough, or are for `HopperAttention` anyway."""
        if self._hopper is not None:
            return HOPPER_ROWS
        return 0 if self._prefill_parts is None else FEW_ROWS

    def most_tiles(self, rows: int, chunks: int, *, many_keys: bool) -> int:
        """Return the most tiles: each chunk has at most one that it does not fill."""
        if hopper := self._hopper_for(rows, many_keys=many_keys):
            return hopper.most_tiles(rows, chunks)
        parts = self._prefill_parts.places if many_keys and self._prefill_parts is not None else 0
        return rows // self._tile(rows) + chunks + parts

    def _hopper_for(self, rows: int, *, many_keys: bool) -> HopperAttention | None:
        """Return what attends in a step of `rows` rows, if it is this."""
        return self._hopper if rows > (FEW_HOPPER_ROWS if many_keys else HOPPER_ROWS) else None

    def _tile(self, rows: int) -> int:
        """Return how many tokens a tile has in a step of `rows` rows."""
        return queries_per_tile(self._query_heads, self._kv_heads, self._prefill(rows=rows).rows)

    def reset(self) -> None:
        """Zero the counters that a failed launch may have left."""
        self._workspace.reset()
        if self._prefill_parts is not None:
            self._prefill_parts.reset()
        if self._hopper is not None:
            self._hopper.reset()
        self._arrivals.zero_()

    def attend(
        self, layer: int, projected: Tensor, rotary: Rotary | Alibi | None, *, then: Next | None = None
    ) -> Tensor:
        """Rotate, store and attend; see `Operations` for the shapes."""
        layout = self._layout
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        tables = layout.tables
        turns = rotary if isinstance(rotary, Rotary) else None
        slopes = rotary.slopes if isinstance(rotary, Alibi) else None
        queries = projected[:, : self._query_heads]
        attended, ahead = self._new_attended(queries, then)
        # Decodes without prompts beside them rotate and store on their own: a launch less in each layer.
        decodes: Tensor | NewTokens = NewTokens(projected, turns, self._scales)
        self._scales = SCALED
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
                attended.view(queries.shape),
                plan=self._plan,
                workspace=self._workspace,
                slopes=slopes,
                marks=ahead.sums if isinstance(ahead, Rows) else ahead and ahead[1],
            )
        if layout.tiles is not None:
            work = queries, keys, values, tables, layout.tiles, attended.view(queries.shape)
            if hopper := self._hopper_for(len(queries), many_keys=layout.many_keys):
                hopper.attend(*work, slopes=slopes)
            else:
                config = self._prefill(rows=len(queries))
                parts = self._prefill_parts if layout.many_keys else None
                prefill_attention(*work, config=config, slopes=slopes, workspace=parts)
        if ahead is not None:
            self._ahead = attended, None, ahead
        return attended

    def _new_attended(self, queries: Tensor, then: Next | None) -> tuple[Tensor, _Ahead | None]:
        """Return where attention's result goes, [T, width], and what it is for the product that takes it."""
        rows, heads, head_dim = queries.shape
        width = heads * head_dim
        fills = head_dim == padded(head_dim)  # otherwise, blocks would be those of wider heads
        if then is not None and self._layout.tiles is None and rows <= min(MARKED_ROWS, FP8_ROWS) and fills:
            if isinstance(then.matrix, Fp8Linear) and not head_dim % SCALED_BLOCK:
                numbers = queries.new_empty((rows, width), dtype=torch.float8_e4m3fn)
                return numbers, (numbers, new_marks(width, SCALED_BLOCK, queries.device))
            if _needs_sums(then.matrix, rows) and not head_dim % BLOCK:
                numbers = queries.new_empty((rows, width))
                return numbers, Rows(numbers, new_marks(width, BLOCK, queries.device))
        return queries.new_empty((rows, width)), None

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [T, width], in one launch."""
        return _normed(hidden, norm)

    def linear(
        self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None, attends: bool = False
    ) -> Tensor:
        """Return `matrix(inputs)`; few rows are limited by reading the weights, and get a kernel for that."""
        if attends and self._layout.tiles is None and _by_library(matrix, len(inputs)):
            x = self._rounded(inputs, norm)
            unscaled, self._scales = unscaled_product(x, matrix, unit=self._unit)
            return unscaled
        product = self._product(inputs, matrix, norm)
        return matrix(_normed(inputs, norm)) if product is None else product

    def add_linear(
        self, hidden: Tensor, inputs: Tensor, matrix: Linear, *, then: Next | None = None
    ) -> Tensor:
        """Add `matrix(inputs)` to `hidden` in place, and return it."""
        norm = _norm_to_round(then, len(inputs))
        if norm is not None and _by_library(matrix, len(inputs)):
            return self._add_ahead(hidden, quantise_rows(inputs), matrix, norm)
        if self._product(inputs, matrix, None, residual=hidden, then=then) is not None:
            return hidden
        if isinstance(matrix, QuantisedLinear | TiledLinear) or matrix.bias is not None:
            return hidden.add_(matrix(inputs))
        return torch.addmm(hidden, inputs, matrix.weight.T, out=hidden)

    def linear_swiglu(
        self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None, then: Next | None = None
    ) -> Tensor:
        """Return silu(first half) * second half of `matrix(inputs)`."""
        product = self._product(inputs, matrix, norm, gated=True, then=then)
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
        then: Next | None = None,
    ) -> Tensor:
        """Return `down` of the activated `up` of the normed `hidden`, and add it to `hidden` if asked to."""
        if gated and _by_library(up, len(hidden)) and _by_library(down, len(hidden)):
            x = gated_rows(self._rounded(hidden, norm), up, unit=self._unit)
            next_norm = _norm_to_round(then, len(hidden))
            if add and next_norm is not None:
                return self._add_ahead(hidden, x, down, next_norm)
            return scaled_product(x, down, unit=self._unit, residual=hidden if add else None)
        if gated:
            activated = self.linear_swiglu(hidden, up, norm=norm, then=Next(down))
        else:
            activated = self.linear_gelu(hidden, up, norm=norm)
        if add:
            return self.add_linear(hidden, activated, down, then=then)
        return self.linear(activated, down)

    def _add_ahead(self, hidden: Tensor, x: tuple[Tensor, Tensor], matrix: Fp8Linear, norm: Norm) -> Tensor:
        """Add a product to `hidden`, and round its norm in the same launch."""
        self._ahead = hidden, norm, added_rows(x, matrix, unit=self._unit, residual=hidden, norm=norm)
        return hidden

    def _rounded(self, inputs: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Return `quantise_rows(inputs, norm)`, which the operation before this one may have made."""
        ahead = self._take_ahead(inputs, norm)
        return ahead if isinstance(ahead, tuple) else quantise_rows(inputs, norm)

    def _rows(self, inputs: Tensor, matrix: Linear, norm: Norm | None) -> Rows:
        """Return the rows for a product, which the operation before this one may have made."""
        sums = _needs_sums(matrix, len(inputs))
        ahead = self._take_ahead(inputs, norm)
        if isinstance(ahead, Rows) and sums == (ahead.sums is not None):
            return ahead
        return prepare(inputs, norm, sums=sums)

    def _take_ahead(self, inputs: Tensor, norm: Norm | None) -> _Ahead | None:
        ahead, self._ahead = self._ahead, None
        return ahead[2] if ahead is not None and ahead[0] is inputs and ahead[1] is norm else None

    def _new_ahead(self, rows: int, columns: int, then: Next | None) -> Rows | None:
        """Return what a product of few rows is to write for the next one; None: only its result.

        A norm is begun in bfloat16 alone: before they are divided, its numbers may be out of float16's range,
        and in float32 a row is to be the same bits in any batch.
        """
        if then is None or rows > MARKED_ROWS or not _has_kernel(then.matrix, rows):
            return None
        sums, norm = _needs_sums(then.matrix, rows), then.norm
        if norm is None and not sums:
            return None
        if norm is not None and (norm.bias is not None or self._dtype != torch.bfloat16):
            return None
        return Rows.empty(rows, columns, sums=sums, norm=norm, dtype=self._dtype, device=self._unit.device)

    def _product(
        self,
        inputs: Tensor,
        matrix: Linear,
        norm: Norm | None,
        *,
        residual: Tensor | None = None,
        gated: bool = False,
        then: Next | None = None,
    ) -> Tensor | None:
        """Return the product by a kernel for it; None: there is none for so many rows, or such a matrix."""
        rows, arrivals = len(inputs), self._arrivals
        if isinstance(matrix, Fp8Linear):
            return self._fp8_product(inputs, matrix, norm, residual, gated=gated)
        if not _has_kernel(matrix, rows, gated=gated):
            return None
        x = self._rows(inputs, matrix, norm)
        if isinstance(matrix, TiledLinear):
            ahead = self._new_ahead(rows, matrix.rows // (1 + gated), then)
            product = tiled_linear(x, matrix, arrivals=arrivals, residual=residual, gated=gated, ahead=ahead)
        else:
            (outputs, keys), ahead = matrix.weight.shape, None
            adds = residual is not None
            tiling = tiling_for(outputs // (1 + gated), keys, gated=gated, adds=adds, dtype=self._dtype)
            if leaves_rows(tiling):
                ahead = self._new_ahead(rows, outputs // (1 + gated), then)
            product = linear(
                x,
                matrix.weight,
                matrix.bias,
                arrivals=arrivals,
                residual=residual,
                gated=gated,
                tiling=tiling,
                ahead=ahead,
            )
        if then is not None and ahead is not None:
            self._ahead = product, then.norm, ahead
        return product

    def _fp8_product(
        self, inputs: Tensor, matrix: Fp8Linear, norm: Norm | None, residual: Tensor | None, *, gated: bool
    ) -> Tensor | None:
        rows = len(inputs)
        if rows <= FP8_ROWS:
            x = self._rounded(inputs, norm)
            return fp8_linear(x, matrix, arrivals=self._arrivals, residual=residual, gated=gated)
        if _by_library(matrix, rows):
            x = self._rounded(inputs, norm)
            return scaled_product(x, matrix, unit=self._unit, residual=residual, gated=gated)
        return None


def _has_kernel(matrix: Linear, rows: int, *, gated: bool = False) -> bool:
    """Return whether a kernel of ours takes such a matrix, not of 8 bits with a point, and so many rows."""
    if isinstance(matrix, TiledLinear):
        return rows <= TILED_ROWS and not (gated and matrix.rows % (2 * TILE))
    return rows <= MAX_ROWS and not isinstance(matrix, QuantisedLinear)


def _needs_sums(matrix: Linear, rows: int) -> bool:
    return isinstance(matrix, TiledLinear) and takes_sums(matrix, rows)


def _by_library(matrix: Linear, rows: int) -> TypeGuard[Fp8Linear]:
    """Return whether the library multiplies so many rows in 8 bits."""
    if not isinstance(matrix, Fp8Linear) or rows <= FP8_ROWS:
        return False
    return not (len(matrix.weight) % _FP8_MULTIPLE or matrix.columns % _FP8_MULTIPLE)


def _norm_to_round(then: Next | None, rows: int) -> Norm | None:
    """Return the norm with which the library's next product takes so many rows in 8 bits, if it does."""
    return then.norm if then is not None and _by_library(then.matrix, rows) else None


def _normed(inputs: Tensor, norm: Norm | None) -> Tensor:
    return inputs if norm is None else norm_rows(inputs, norm.weight, norm.epsilon, norm.bias)


def _sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where kernels are interpreted on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
