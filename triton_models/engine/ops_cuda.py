"""A step's operations with our own GPU kernels; needs the `triton` package, which torch for CUDA installs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triton_models.engine.blocks import KVCache
from triton_models.engine.kernels.attention_decode import DecodeWorkspace, decode_attention, plan_decode
from triton_models.engine.kernels.attention_prefill import (
    make_tiles,
    prefill_attention,
    prefill_config,
    queries_per_tile,
)
from triton_models.engine.kernels.elementwise import norm, rotate_store, swiglu
from triton_models.engine.kernels.linear import MAX_ROWS, linear, linear_swiglu, new_arrivals
from triton_models.engine.linear import Linear
from triton_models.engine.models import CausalModel, ChunkRows, Rotary, StepLayout


class CudaOperations:
    """`StepOperations` of a model whose steps run one after the other on one stream."""

    def __init__(self, model: CausalModel, cache: KVCache, rows: int) -> None:
        kv = model.kv_shape
        self._cache = cache
        self._query_heads = model.query_heads
        self._kv_heads = kv.heads
        self._head_dim = kv.head_dim
        self._dtype = model.dtype
        self._sm_count = _sm_count(model.device)
        self._workspace = DecodeWorkspace(
            rows=rows,
            query_heads=model.query_heads,
            kv_heads=kv.heads,
            head_dim=kv.head_dim,
            device=model.device,
        )
        self._arrivals = new_arrivals(model.device)
        self._tile = queries_per_tile(model.query_heads, kv.heads, prefill_config(kv.head_dim, model.dtype))

    def begin(self, layout: StepLayout) -> None:
        """Choose how the step's decodes are divided among programs."""
        self._layout = layout
        self.positions = layout.positions
        self._positions = layout.positions.int()
        self._decodes = len(layout.decode_lengths)
        if self._decodes:
            self._splits, self._config = plan_decode(
                self._decodes,
                self._kv_heads,
                self._head_dim,
                self._dtype,
                sm_count=self._sm_count,
                max_length=layout.longest_decode,
                beside_prompts=layout.tiles is not None,
            )

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[tuple[int, int, int, int]]:
        """Divide chunks into the tiles of the prefill kernel."""
        return make_tiles(chunks, self._tile)

    def most_tiles(self, rows: int, chunks: int) -> int:
        """Return the most tiles: each chunk has at most one that it does not fill."""
        return rows // self._tile + chunks

    def reset(self) -> None:
        """Zero the counters that a failed launch may have left."""
        self._workspace.reset()
        self._arrivals.zero_()

    def attend(self, layer: int, projected: Tensor, rotary: Rotary) -> Tensor:
        """Rotate, store and attend; see `Operations` for the shapes."""
        layout = self._layout
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        tables, slots = layout.tables, layout.slots
        rotate_store(
            projected,
            rotary.cos,
            rotary.sin,
            self._positions,
            tables,
            slots,
            keys,
            values,
            query_heads=self._query_heads,
        )
        queries = projected[:, : self._query_heads]
        attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if self._decodes:
            decode_attention(
                queries[: self._decodes],
                keys,
                values,
                tables,
                slots,
                layout.decode_lengths,
                attended,
                splits=self._splits,
                workspace=self._workspace,
                config=self._config,
            )
        if layout.tiles is not None:
            # After decode attention, whose padding rows have written zeros to rows of prompts.
            prefill_attention(queries, keys, values, tables, layout.tiles, attended)
        return attended.flatten(1)

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the RMSNorm of [T, width] in one launch."""
        return norm(hidden, weight, epsilon)

    def linear(self, inputs: Tensor, matrix: Linear) -> Tensor:
        """Return `matrix(inputs)`; few rows are limited by reading the weights, and get a kernel for that."""
        if len(inputs) <= MAX_ROWS:
            return linear(inputs, matrix.weight, matrix.bias, arrivals=self._arrivals)
        return matrix(inputs)

    def add_linear(self, hidden: Tensor, inputs: Tensor, matrix: Linear) -> Tensor:
        """Add `matrix(inputs)` to `hidden` in place, and return it."""
        if len(inputs) <= MAX_ROWS:
            return linear(inputs, matrix.weight, arrivals=self._arrivals, residual=hidden)
        return torch.addmm(hidden, inputs, matrix.weight.T, out=hidden)

    def linear_swiglu(self, inputs: Tensor, matrix: Linear) -> Tensor:
        """Return silu(first half) * second half of `matrix(inputs)`."""
        if len(inputs) <= MAX_ROWS:
            return linear_swiglu(inputs, matrix.weight, arrivals=self._arrivals)
        return swiglu(matrix(inputs))


def _sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where kernels are interpreted on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
