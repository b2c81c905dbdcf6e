"""The expensive operations of a model's forward pass: an interface with several implementations."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from triton_models.engine.packed_weights import packed_linear


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position tables, each [positions, pairs] float32.

    The first `2 * pairs` numbers of a head are rotated as interleaved pairs (0 with 1, 2 with 3, ...); the
    rest is not rotated. After Su et al., "RoFormer" (arXiv 2104.09864), section 3.2.2.
    """

    cos: Tensor
    sin: Tensor


class Operations(Protocol):
    """One step's operations. Unless a method says otherwise, it may overwrite the activations passed to it.

    T is the number of tokens in the step. All tensors but the weights of norms and the rotary tables have the
    model's dtype.
    """

    @property
    def positions(self) -> Tensor:
        """[T] int64: each token's place in its own sequence."""
        ...

    def attend(self, layer: int, projected: Tensor, rotary: Rotary) -> Tensor:
        """Rotate queries and keys, store keys and values; each token attends to its sequence up to itself.

        Args:
            layer: index of the layer.
            projected: [T, query heads + 2 * KV heads, head_dim]: all query heads, then key heads, then value
                heads. Consecutive query heads share a KV head.
            rotary: the model's tables.

        Returns:
            [T, query heads * head_dim].
        """
        ...

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the RMSNorm of `hidden`, [T, width], without changing `hidden`.

        Args:
            hidden: the residual stream.
            weight: [width] float32.
            epsilon: added to the mean square.

        Returns:
            [T, width], computed in float32.
        """
        ...

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `inputs @ weight.T + bias`: [T, K] and [N, K] give [T, N]."""
        ...

    def add_linear(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return `hidden + inputs @ weight.T`: [T, N], [T, K] and [N, K] give [T, N]."""
        ...

    def linear_swiglu(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return silu(first half) * second half of `inputs @ weight.T`: [T, K] and [2 * F, K] give [T, F]."""
        ...


class PlainMath:
    """Everything but the attention, in plain torch: for any device, and differentiable."""

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `Operations`."""
        return rms_norm(hidden.float(), weight.shape, weight, epsilon).to(hidden.dtype)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Operations`. The weight may be packed."""
        return packed_linear(inputs, weight, bias) if weight.is_mkldnn else linear(inputs, weight, bias)

    def add_linear(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """See `Operations`."""
        return hidden + self.linear(inputs, weight)

    def linear_swiglu(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """See `Operations`."""
        gate, up = self.linear(inputs, weight).chunk(2, dim=-1)
        return silu(gate) * up


def rotate_in_place(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `2 * pairs` numbers of each head in place, computing in float32.

    Args:
        heads: [T, heads, head_dim], changed.
        cos: [T, 1, pairs] float32, of each token's position.
        sin: likewise.
    """
    rotary = heads[..., : 2 * cos.shape[-1]]
    even, odd = rotary[..., 0::2].float(), rotary[..., 1::2].float()
    rotated_even, rotated_odd = even * cos - odd * sin, odd * cos + even * sin
    rotary[..., 0::2] = rotated_even.to(heads.dtype)
    rotary[..., 1::2] = rotated_odd.to(heads.dtype)


def rotation(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of `positions` ([T]), each [T, 1, pairs]."""
    return rotary.cos[positions, None, :], rotary.sin[positions, None, :]


def split_heads(projected: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the queries, keys and values in `projected`."""
    queries = projected.shape[1] - 2 * kv_heads
    parts: list[Tensor] = list(torch.split(projected, [queries, kv_heads, kv_heads], dim=1))
    return parts[0], parts[1], parts[2]
