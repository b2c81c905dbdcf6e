"""The interface that a model must offer to the engine. Knows nothing of any particular model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triton_models.engine.operations import Operations


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the KV cache stores per token: keys and values, each of shape [layers, heads, head_dim]."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


class CausalModel(Protocol):
    """A decoder over token ids. Only its attention (`Operations.attend`) tells sequences apart."""

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
        """What the KV cache stores per token."""
        ...

    @property
    def query_heads(self) -> int:
        """Query heads of each layer; a multiple of the KV heads."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and KV cache."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        ...

    def pack(self, pack: Callable[[Tensor], Tensor]) -> None:
        """Replace each weight matrix that `Operations` multiplies by with `pack` of it, one at a time.

        From then on the model works only with operations that take packed matrices.
        """
        ...

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute the new tokens as far as later ones need them: all keys and values.

        What only the logits of the same token need is left to `logits`: most of a prompt's tokens get none.

        Args:
            tokens: [T] int64, the new tokens of every sequence of the step, one after the other.
            operations: the step's operations; they know each token's sequence and position.

        Returns:
            [T, width] hidden states, for `logits`.
        """
        ...

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the next-token logits for some of a step's tokens.

        Args:
            hidden: [S, width], rows of the result of `forward`; may be overwritten.
            operations: the step's operations.

        Returns:
            [S, vocab_size] logits, a tensor that the caller may change.
        """
        ...
