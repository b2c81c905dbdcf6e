"""A step's operations with our own GPU kernels; needs the `triton` package, which torch for CUDA installs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from triton_models.engine.kernels.attention_decode import decode_attention
from triton_models.engine.kernels.attention_prefill import (
    PrefillRange,
    make_tiles,
    prefill_attention,
    prefill_config,
    queries_per_tile,
)
from triton_models.engine.kernels.decode_plan import DecodeWorkspace, plan_decode
from triton_models.engine.kernels.linear import MAX_ROWS, linear, linear_swiglu, new_arrivals
from triton_models.engine.kernels.norm import norm
from triton_models.engine.kernels.rotate_store import rotate_store
from triton_models.engine.kernels.swiglu import swiglu
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import ChunkRows, StepLayout
from triton_models.engine.model import CausalModel
from triton_models.engine.operations import Rotary


class KernelSteps:
    """Creates the operations of a model's steps, which run one after the other on one stream."""

    def __init__(self, model: CausalModel, cache: KVCache, rows: int) -> None:
        kv = model.kv_shape
        self.cache = cache
        self.query_heads = model.query_heads
        self.kv_heads = kv.heads
        self.head_dim = kv.head_dim
        self.dtype = model.dtype
        self.processors = _processors(model.device)
        self.decode = DecodeWorkspace(
            rows=rows,
            query_heads=model.query_heads,
            kv_heads=kv.heads,
            head_dim=kv.head_dim,
            device=model.device,
        )
        self.arrivals = new_arrivals(model.device)
        self._tile = queries_per_tile(model.query_heads, kv.heads, prefill_config(kv.head_dim, model.dtype))

    def __call__(self, layout: StepLayout) -> "KernelOperations":
        """Return the operations of one step."""
        return KernelOperations(self, layout)

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[tuple[int, int, int, int]]:
        """See `StepOperations`."""
        ranges = [
            PrefillRange(
                table_row=chunk.slot, start=chunk.start, offset=chunk.offset, count=chunk.end - chunk.start
            )
            for chunk in chunks
        ]
        return make_tiles(ranges, self._tile)

    def most_tiles(self, rows: int, chunks: int) -> int:
        """See `StepOperations`: each chunk has at most one tile that it does not fill."""
        return rows // self._tile + chunks

    def reset(self) -> None:
        """See `StepOperations`."""
        self.decode.reset()
        self.arrivals.zero_()


class KernelOperations:
    """One step's `Operations`."""

    def __init__(self, steps: KernelSteps, layout: StepLayout) -> None:
        self._steps = steps
        self._layout = layout
        self.positions = layout.positions
        self._positions = layout.positions.int()
        self._decodes = len(layout.decode_lengths)
        if self._decodes:
            self._plan = plan_decode(
                self._decodes,
                steps.kv_heads,
                steps.head_dim,
                steps.dtype,
                sm_count=steps.processors,
                max_length=layout.longest_decode,
                beside_prompts=layout.tiles is not None,
            )

    def attend(self, layer: int, projected: Tensor, rotary: Rotary) -> Tensor:
        """See `Operations`."""
        steps, layout = self._steps, self._layout
        keys, values = steps.cache.keys[layer], steps.cache.values[layer]
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
            query_heads=steps.query_heads,
        )
        queries = projected[:, : steps.query_heads]
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
                splits=self._plan.splits,
                workspace=steps.decode,
                config=self._plan.config,
            )
        if layout.tiles is not None:
            # After decode attention, whose padding rows have written zeros to rows of prompts.
            prefill_attention(queries, keys, values, tables, layout.tiles, attended)
        return attended.flatten(1)

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `Operations`."""
        return norm(hidden, weight, epsilon)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Operations`."""
        if len(inputs) <= MAX_ROWS:
            return linear(inputs, weight, bias, arrivals=self._steps.arrivals)
        return functional.linear(inputs, weight, bias)

    def add_linear(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """See `Operations`; adds to `hidden` in place."""
        if len(inputs) <= MAX_ROWS:
            return linear(inputs, weight, arrivals=self._steps.arrivals, residual=hidden)
        return torch.addmm(hidden, inputs, weight.T, out=hidden)

    def linear_swiglu(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """See `Operations`."""
        if len(inputs) <= MAX_ROWS:
            return linear_swiglu(inputs, weight, arrivals=self._steps.arrivals)
        return swiglu(functional.linear(inputs, weight))


def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where kernels are interpreted on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
