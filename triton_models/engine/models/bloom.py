"""The forward pass of BLOOM. Knows nothing of files, blocks or requests."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, KVShape, Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig:
    """The numbers that shape the model."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    """Length of the longest sequence."""
    epsilon: float
    """Of all norms."""
    tied: bool = True
    """The head is the embedding's matrix."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def feed_forward(self) -> int:
        """Width between the two matrices of the feed-forward part."""
        return 4 * self.hidden

    def nbytes(
        self, dtype: torch.dtype, form: type[Linear] = Linear, head: type[Linear] | None = None
    ) -> int:
        """Return the bytes that a model of this shape allocates: weights, norms and slopes."""
        hidden, ffn = self.hidden, self.feed_forward
        shapes = ((3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn))
        layer = sum(form.bytes_for(*shape, dtype) + shape[0] * dtype.itemsize for shape in shapes)
        ends = (Linear,) if self.tied else (Linear, head or form)
        weights = sum(each.bytes_for(self.vocabulary, hidden, dtype) for each in ends) + self.layers * layer
        norms = 2 * (2 * self.layers + 2) * hidden
        return weights + (norms + self.heads) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias of a LayerNorm, float32."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomLayer:
    """One layer. Rows of `qkv` are all query heads, then key heads, then value heads."""

    input_norm: Norm
    qkv: Linear
    attention_out: Linear
    feed_forward_norm: Norm
    up: Linear
    down: Linear


class Bloom:
    """A `CausalModel`: LayerNorm, also of the embedding, ALiBi, GELU, a bias in every matrix but the head.

    The weights are allocated here and filled by whoever reads the checkpoint. Matrices are in the `form`
    given, but for the embedding, a head that is the same, and one in the form `head`.
    """

    def __init__(
        self,
        config: BloomConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: type[Linear] = Linear,
        head: type[Linear] | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocabulary
        self.max_positions = config.positions
        self.kv_shape = KVShape(config.layers, config.heads, config.head_dim)
        self.query_heads = config.heads
        self.dtype = dtype
        self.device = device
        hidden, ffn = config.hidden, config.feed_forward

        def matrix(rows: int, columns: int) -> Linear:
            return form.empty(rows, columns, bias=True, dtype=dtype, device=device)

        def norm() -> Norm:
            weight, bias = (torch.empty(hidden, dtype=torch.float32, device=device) for _ in range(2))
            return Norm(weight, bias)

        self.embedding = torch.empty((config.vocabulary, hidden), dtype=dtype, device=device)
        self.embedding_norm = norm()
        self.layers = [
            BloomLayer(
                input_norm=norm(),
                qkv=matrix(3 * hidden, hidden),
                attention_out=matrix(hidden, hidden),
                feed_forward_norm=norm(),
                up=matrix(ffn, hidden),
                down=matrix(hidden, ffn),
            )
            for _ in range(config.layers)
        ]
        self.final_norm = norm()
        if config.tied:
            self.head = Linear(self.embedding)
        else:
            shape = config.vocabulary, hidden
            self.head = (head or form).empty(*shape, bias=False, dtype=dtype, device=device)
        self._alibi = Alibi(torch.tensor(_slopes(config.heads), dtype=torch.float32, device=device))

    def convert(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace each matrix by `convert` of it, one at a time."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = replace(
                layer,
                qkv=convert(layer.qkv),
                attention_out=convert(layer.attention_out),
                up=convert(layer.up),
                down=convert(layer.down),
            )
        self.head = convert(self.head)

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute all layers, but of the last one only the attention."""
        hidden = self._norm(embedding(tokens, self.embedding), self.embedding_norm, operations)
        for index, layer in enumerate(self.layers):
            normed = self._norm(hidden, layer.input_norm, operations)
            heads = operations.linear(normed, layer.qkv).view(len(tokens), -1, self.config.head_dim)
            attended = operations.attend(index, heads, self._alibi)
            hidden = operations.add_linear(hidden, attended, layer.attention_out)
            if layer is not self.layers[-1]:
                hidden = self._feed_forward(layer, hidden, operations)
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the last layer's feed-forward part, the final norm and the head."""
        hidden = self._feed_forward(self.layers[-1], hidden, operations)
        return operations.linear(self._norm(hidden, self.final_norm, operations), self.head)

    def _feed_forward(self, layer: BloomLayer, hidden: Tensor, operations: Operations) -> Tensor:
        normed = self._norm(hidden, layer.feed_forward_norm, operations)
        return operations.add_linear(hidden, operations.linear_gelu(normed, layer.up), layer.down)

    def _norm(self, hidden: Tensor, norm: Norm, operations: Operations) -> Tensor:
        return operations.layer_norm(hidden, norm.weight, norm.bias, self.config.epsilon)


def _slopes(heads: int) -> list[float]:
    """Return a slope for each head, as the published code of ALiBi and BLOOM has them.

    With a power of two of heads, that is a geometric sequence that ends in 2 ** -8. Other numbers have the
    next smaller power's, then every other one of twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8 / power)
    between = math.sqrt(first)
    return [first**number for number in range(1, power + 1)] + [
        between**number for number in range(1, 2 * (heads - power), 2)
    ]
