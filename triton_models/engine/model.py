"""What the engine asks of a model. Knows nothing of any particular one."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps per token: keys and values of `layers` layers, in `heads` heads of `head_dim`."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


class Attention(Protocol):
    """One step's attention over each sequence's own past."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store the new keys and values, then attend.

        Args:
            layer: index of the layer.
            queries: [T, query heads, head_dim]; query heads are a multiple of the KV heads, and consecutive
                ones share a KV head.
            keys: [T, KV heads, head_dim], positions already encoded.
            values: [T, KV heads, head_dim].

        Returns:
            [T, query heads, head_dim], each token attending to its sequence up to itself.
        """
        ...


class CausalModel(Protocol):
    """A decoder over token ids. Sequences are told apart by the attention alone."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence."""
        ...

    @property
    def kv_shape(self) -> KVShape:
        """What the KV cache holds per token."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Compute the logits behind some of the tokens.

        Args:
            tokens: [T] int64, the new tokens of every sequence of the step, one after the other.
            positions: [T] int64, each token's place in its own sequence.
            attention: stores keys and values and attends, layer by layer.
            rows: [S] int64, the tokens whose logits are wanted.

        Returns:
            [S, vocab_size] logits, a tensor that the caller may change.
        """
        ...
