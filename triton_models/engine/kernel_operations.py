"""A step's operations by our own GPU kernels; needs the `triton` package, which torch for CUDA brings."""

import torch
from torch import Tensor

from triton_models.engine.kernels.add_norm import add_norm
from triton_models.engine.kernels.attention_decode import decode_attention
from triton_models.engine.kernels.attention_prefill import (
    PrefillRange,
    make_tiles,
    prefill_attention,
    prefill_config,
    queries_per_tile,
)
from triton_models.engine.kernels.decode_plan import DecodeWorkspace, choose_splits
from triton_models.engine.kernels.linear import linear, linear_swiglu, new_arrivals
from triton_models.engine.kernels.rotate_store import rotate_store
from triton_models.engine.kernels.swiglu import swiglu
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import StepLayout
from triton_models.engine.model import CausalModel
from triton_models.engine.operations import Rotary

FEW_ROWS = 0
"""Up to so many rows our own products are faster than the library's: see bench/LOG.md."""

_MAX_SPLIT_ROWS = 128
"""Larger batches fill any device without splitting a sequence."""


class KernelBuffers:
    """What the steps of one model share; they run one after the other on one stream."""

    def __init__(self, model: CausalModel, cache: KVCache, rows: int) -> None:
        kv = model.kv_shape
        self.cache = cache
        self.query_heads = model.query_heads
        self.processors = _processors(model.device)
        self.decode = DecodeWorkspace(
            rows=min(rows, _MAX_SPLIT_ROWS),
            query_heads=model.query_heads,
            kv_heads=kv.heads,
            head_dim=kv.head_dim,
            device=model.device,
        )
        self.arrivals = new_arrivals(model.device)
        self.prefill_tile = queries_per_tile(
            model.query_heads, kv.heads, prefill_config(kv.head_dim, model.dtype)
        )

    def operations(self, layout: StepLayout) -> "KernelOperations":
        """Return the operations of one step."""
        return KernelOperations(self, layout)


class KernelOperations:
    """One step's `Operations`."""

    def __init__(self, buffers: KernelBuffers, layout: StepLayout) -> None:
        self._buffers = buffers
        self._layout = layout
        self.positions = layout.positions
        self._positions = layout.positions.int()
        decodes = layout.decodes
        if decodes:
            cache = buffers.cache
            self._lengths = self._positions[:decodes] + 1
            self._splits = 1
            if decodes <= buffers.decode.rows:
                self._splits = choose_splits(
                    decodes, cache.keys.shape[3], buffers.processors, layout.longest_decode
                )
        if layout.chunks:
            self._tiles = self._upload_tiles()

    def attend(self, layer: int, projected: Tensor, rotary: Rotary) -> Tensor:
        """See `Operations`."""
        buffers, layout = self._buffers, self._layout
        keys, values = buffers.cache.keys[layer], buffers.cache.values[layer]
        tables, slots = layout.tables, layout.slots
        heads = buffers.query_heads
        rotate_store(
            projected,
            rotary.cos,
            rotary.sin,
            self._positions,
            tables,
            slots,
            keys,
            values,
            query_heads=heads,
        )
        queries = projected[:, :heads]
        attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if layout.decodes:
            decode_attention(
                queries[: layout.decodes],
                keys,
                values,
                tables,
                slots,
                self._lengths,
                attended,
                splits=self._splits,
                workspace=buffers.decode,
            )
        if layout.chunks:
            prefill_attention(queries, keys, values, tables, self._tiles, attended)
        return attended.flatten(1)

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`."""
        return hidden, add_norm(hidden, delta, weight, epsilon)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Operations`."""
        if len(inputs) > FEW_ROWS:
            return torch.nn.functional.linear(inputs, weight, bias)
        return linear(inputs, weight, bias, arrivals=self._buffers.arrivals)

    def linear_swiglu(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """See `Operations`."""
        if len(inputs) > FEW_ROWS:
            return swiglu(torch.nn.functional.linear(inputs, weight))
        return linear_swiglu(inputs, weight, arrivals=self._buffers.arrivals)

    def _upload_tiles(self) -> Tensor:
        ranges = [
            PrefillRange(
                table_row=chunk.slot, start=chunk.start, offset=chunk.offset, count=chunk.end - chunk.start
            )
            for chunk in self._layout.chunks
        ]
        tiles = torch.tensor(make_tiles(ranges, self._buffers.prefill_tile), dtype=torch.int32)
        device = self.positions.device
        return tiles.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tiles


def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where kernels are interpreted on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
