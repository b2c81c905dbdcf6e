"""What the engine asks of a model. Knows nothing of any particular one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triton_models.engine.operations import Operations


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps per token: keys and values of `layers` layers, in `heads` heads of `head_dim`."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


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
    def query_heads(self) -> int:
        """Query heads of each layer; a multiple of the KV heads."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def pack(self, pack: Callable[[Tensor], Tensor]) -> None:
        """Replace every matrix of `Operations`' products by what `pack` makes of it, one after the other.

        From then on the model computes only with operations that take such matrices.
        """
        ...

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute what the new tokens leave behind the last layer.

        Args:
            tokens: [T] int64, the new tokens of every sequence of the step, one after the other.
            operations: what the step is computed with; they know each token's sequence and position.

        Returns:
            [T, width], for `logits`.
        """
        ...

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the logits behind some of a step's tokens.

        Args:
            hidden: [S, width], rows of what `forward` gave.
            operations: those of the step.

        Returns:
            [S, vocab_size] logits, a tensor that the caller may change.
        """
        ...
