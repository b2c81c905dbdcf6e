"""A random paged cache with NaN wherever no kernel may look, and attention computed directly."""

from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = 2**30
"""Stands in a block table where no block is: following it would fault."""

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    group: int = 3
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16

    @property
    def query_heads(self) -> int:
        return self.group * self.kv_heads


class PagedCase:
    """Sequences of the given lengths in scattered blocks, their table rows in no order either."""

    def __init__(
        self,
        lengths: list[int],
        shape: Shape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.shape, self.lengths, self.device = shape, lengths, device
        generator = torch.Generator().manual_seed(seed)
        self._generator, self._dtype = generator, dtype
        needed = [-(-length // shape.block_size) for length in lengths]
        width = max(needed) + 1
        blocks = torch.split(torch.randperm(sum(needed), generator=generator) + 1, needed)
        self.table_rows = torch.randperm(len(lengths) + 1, generator=generator)[: len(lengths)].tolist()
        tables = torch.full((len(lengths) + 1, width), NOWHERE, dtype=torch.int32)
        self.contents = [
            (self.random(length, shape.kv_heads), self.random(length, shape.kv_heads)) for length in lengths
        ]
        size = (sum(needed) + 1, shape.block_size, shape.kv_heads, shape.head_dim)
        self.keys = torch.full(size, torch.nan, dtype=dtype, device=device)
        self.values = self.keys.clone()
        for row, owned, contents in zip(self.table_rows, blocks, self.contents, strict=True):
            tables[row, : len(owned)] = owned
            for cache, part in zip((self.keys, self.values), contents, strict=True):
                slots = (owned[:, None] * shape.block_size + torch.arange(shape.block_size)).flatten()
                cache.flatten(0, 1)[slots[: len(part)].to(device)] = part
        self.tables = tables.to(device)

    def random(self, tokens: int, heads: int) -> Tensor:
        """Return [tokens, heads, head_dim] of standard normal numbers."""
        size = (tokens, heads, self.shape.head_dim)
        return torch.randn(size, generator=self._generator).to(self.device, self._dtype)

    def slopes(self) -> Tensor:
        """Return slopes, as ALiBi has them, for the query heads."""
        return 2.0 ** -torch.arange(1, self.shape.query_heads + 1, dtype=torch.float32, device=self.device)

    def integers(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def attend(self, sequence: int, queries: Tensor, offset: int, slopes: Tensor | None = None) -> Tensor:
        """Return what float64 makes of the queries at positions from `offset`."""
        keys, values = (
            part.double().repeat_interleave(self.shape.group, dim=1) for part in self.contents[sequence]
        )
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * self.shape.head_dim**-0.5
        positions = torch.arange(len(keys), device=self.device)
        distances = positions[None, :] - offset - positions[: len(queries), None]
        if slopes is not None:
            scores += slopes.double()[:, None, None] * distances
        weights = scores.masked_fill(distances > 0, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare by relative norm; NaN never passes."""
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCES[actual.dtype], error
