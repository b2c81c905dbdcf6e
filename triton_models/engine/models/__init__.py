"""The seam between a model and the engine: what a model offers, and what it is given in a step.

Knows nothing of any particular model, nor of any device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from triton_models.engine.linear import Linear


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the KV cache stores per token: keys and values, each of shape [layers, heads, head_dim]."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position tables, each [positions, pairs] float32.

    The first `2 * pairs` numbers of a head are rotated as interleaved pairs (0 with 1, 2 with 3, ...); the
    rest is not rotated. After Su et al., "RoFormer" (arXiv 2104.09864), section 3.2.2.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Alibi:
    """How fast each head's scores fall with the distance to a key: `slope * (key's - query's position)`.

    Added to the scaled scores. After Press et al., "Train Short, Test Long" (arXiv 2108.12409), section 3.
    """

    slopes: Tensor
    """[query heads] float32."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A LayerNorm, or without a bias an RMSNorm; [width] float32, whatever the model's dtype."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    """Added to the variance, or to the mean square."""


@dataclass(frozen=True, slots=True)
class Next:
    """What an operation's result goes into: told ahead, so that it may be written as that takes it.

    With a norm, the result is hidden states, which others use as well. Without one, nobody else uses it.
    """

    matrix: Linear
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """New tokens of one sequence: rows `start` to `end` - 1 of the step, from position `offset` on.

    A sequence is named by its slot, the row of `StepLayout.tables` that lists its KV blocks.
    """

    slot: int
    start: int
    end: int
    offset: int

    @property
    def length(self) -> int:
        """Number of the sequence's tokens up to the end of the chunk."""
        return self.offset + self.end - self.start


class Tile(NamedTuple):
    """What a program of attention takes: some new tokens of a sequence, and a part of their keys."""

    slot: int
    row: int
    """The first of the step's rows."""
    position: int
    """The first token's place in its sequence."""
    tokens: int
    part: int = 0
    parts: int = 0
    place: int = 0
    """Where the results of the first part go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Which of a step's T tokens belongs to which sequence: first D decodes, one token each; then chunks."""

    tables: Tensor
    """[slots, blocks] int32."""
    slots: Tensor
    """[T] int32, each token's sequence."""
    positions: Tensor
    """[T] int64, each token's position in its sequence; -1 in padding rows of steps with prompts."""
    decode_lengths: Tensor
    """[D] int32, tokens of each decoding sequence, including the new one; 0 in rows without a decode."""
    longest_decode: int
    """Upper bound of `decode_lengths`: it affects what plain torch takes, but no results."""
    chunks: tuple[ChunkRows, ...] = ()
    tiles: Tensor | None = None
    """[N, 7] int32, what `StepOperations.tiles` made of the chunks; None for a step without any."""
    many_keys: bool = False
    """Whether attention is the one for tokens that come after many, in steps of few rows, which have another
    for others (`StepOperations.many_keys_rows`)."""


class Operations(Protocol):
    """What a model computes with. Unless a method says otherwise, it may overwrite the activations given.

    T is the number of tokens in the step. All tensors but the weights of norms, the rotary tables and slopes
    have the model's dtype. A product's `norm` is the one that its inputs get first, which stay as they are.
    `then` may tell where the result goes, to save work.
    """

    @property
    def positions(self) -> Tensor:
        """[T] int64: each token's place in its own sequence."""
        ...

    def attend(
        self, layer: int, projected: Tensor, rotary: Rotary | Alibi | None, *, then: Next | None = None
    ) -> Tensor:
        """Store keys and values; each token attends to its sequence up to itself.

        Args:
            layer: index of the layer.
            projected: [T, query heads + 2 * KV heads, head_dim]: all query heads, then key heads, then value
                heads. Consecutive query heads share a KV head.
            rotary: how the model knows positions: queries and keys are rotated by these tables, or scores
                fall with the distance. None: it has rotated them itself.
            then: without a norm.

        Returns:
            [T, query heads * head_dim].
        """
        ...

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return the norm of `hidden`, [T, width], computed in float32; `hidden` stays as it is."""
        ...

    def linear(
        self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None, attends: bool = False
    ) -> Tensor:
        """Return `matrix(inputs)`: [T, K] gives [T, N]; if it `attends`, only for `attend`, which is next."""
        ...

    def add_linear(
        self, hidden: Tensor, inputs: Tensor, matrix: Linear, *, then: Next | None = None
    ) -> Tensor:
        """Return `hidden + matrix(inputs)`: [T, N] and [T, K] give [T, N]."""
        ...

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
        """Return `down(activated)`, plus `hidden` if `add`: [T, width], of `hidden`, [T, width].

        `activated` is GELU, in its form with tanh, of `up` of the normed `hidden`; gated, with P the product,
        it is silu(first half of P) * second half of P, and `up` has no bias.
        """
        ...


class CausalModel(Protocol):
    """A decoder over token ids. Only its attention (`Operations.attend`) tells sequences apart."""

    vocab_size: int
    """Width of the logits."""
    max_positions: int
    """Length of the longest sequence."""
    kv_shape: KVShape
    """What the KV cache stores per token."""
    query_heads: int
    """Query heads of each layer; a multiple of the KV heads."""
    dtype: torch.dtype
    """The dtype of weights, activations and KV cache."""
    device: torch.device
    """The device that holds the weights."""
    leans: bool
    """Whether scores fall with the distance (`Alibi`)."""

    def convert(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace each `Linear` by `convert` of it, one at a time."""
        ...

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute the new tokens as far as later ones need them: all keys and values.

        What only the logits of the same token need is left to `logits`: most of a prompt's tokens get none.

        Args:
            tokens: [T] int64, the new tokens of every sequence of the step, one after the other.
            operations: know each token's sequence and position.

        Returns:
            [T, width] hidden states, for `logits`.
        """
        ...

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the next-token logits for some of a step's tokens, without attending.

        Args:
            hidden: [S, width], rows of the result of `forward`; may be overwritten.
            operations: those of `forward`.

        Returns:
            [S, vocab_size] logits, a tensor that the caller may change.
        """
        ...
