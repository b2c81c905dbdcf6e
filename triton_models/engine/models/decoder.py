"""The forward pass of GLM-4 in transformers' form, GLM-4-0414, GLM-Z1, Llama, Mistral, Qwen2 and Qwen3.

They differ in a few switches (`DecoderConfig`). All rotate interleaved pairs here, whatever their checkpoints
do: who reads a checkpoint brings the rows of queries and keys into that order, which changes no product of a
query and a key. Knows nothing of files, blocks or requests.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from triton_models.engine.linear import Linear
from triton_models.engine.models import KVShape, Operations
from triton_models.engine.models.rope import Rope, rotary_table


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The numbers and switches that shape the model."""

    layers: int
    hidden: int
    feed_forward: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    """Length of the longest sequence."""
    epsilon: float
    """Of all norms."""
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    """The attention's output has a bias."""
    head_norms: bool = False
    """Each query and key head is normed before it is rotated."""
    output_norms: bool = False
    """What attention and feed-forward part add to the residual stream is normed."""
    tied: bool = False
    """The head is the embedding's matrix."""

    @property
    def query_width(self) -> int:
        """Width of all query heads of one token."""
        return self.query_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Width of all query, key and value heads of one token."""
        return self.query_width + 2 * self.kv_heads * self.head_dim

    def nbytes(
        self, dtype: torch.dtype, form: type[Linear] = Linear, head: type[Linear] | None = None
    ) -> int:
        """Return the bytes that a model of this shape allocates: weights, norms and rotary tables."""
        hidden, ffn = self.hidden, self.feed_forward
        shapes = ((self.qkv_width, hidden), (hidden, self.query_width), (2 * ffn, hidden), (hidden, ffn))
        layer = sum(form.bytes_for(*shape, dtype) for shape in shapes)
        layer += (self.qkv_bias * self.qkv_width + self.out_bias * hidden) * dtype.itemsize
        ends = (Linear,) if self.tied else (Linear, head or form)
        weights = sum(each.bytes_for(self.vocabulary, hidden, dtype) for each in ends) + self.layers * layer
        per_layer = (4 if self.output_norms else 2) * self.hidden + 2 * self.head_norms * self.head_dim
        norms = self.layers * per_layer + self.hidden
        rotary = 2 * self.positions * self.rope.pairs
        return weights + (norms + rotary) * torch.float32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer.

    Rows of `qkv` are all query heads, then key heads, then value heads; rows of `gate_up` are the gate, then
    the projection that it gates. Norms are float32, and None where the model has none.
    """

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: Linear
    attention_norm: Tensor | None
    feed_forward_norm: Tensor
    gate_up: Linear
    down: Linear
    output_norm: Tensor | None


class Decoder:
    """A `CausalModel`. The weights are allocated here and filled by whoever reads the checkpoint.

    Matrices are in the `form` given, but for the embedding, a head that is the same, and one in the form
    `head`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: type[Linear] = Linear,
        head: type[Linear] | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocabulary
        self.max_positions = config.positions
        self.kv_shape = KVShape(config.layers, config.kv_heads, config.head_dim)
        self.query_heads = config.query_heads
        self.dtype = dtype
        self.device = device

        def weights(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def matrix(rows: int, columns: int, *, bias: bool = False) -> Linear:
            return form.empty(rows, columns, bias=bias, dtype=dtype, device=device)

        def norm(width: int = config.hidden) -> Tensor:
            return torch.empty(width, dtype=torch.float32, device=device)

        self.embedding = weights(config.vocabulary, config.hidden)
        self.layers = [
            DecoderLayer(
                input_norm=norm(),
                qkv=matrix(config.qkv_width, config.hidden, bias=config.qkv_bias),
                query_norm=norm(config.head_dim) if config.head_norms else None,
                key_norm=norm(config.head_dim) if config.head_norms else None,
                attention_out=matrix(config.hidden, config.query_width, bias=config.out_bias),
                attention_norm=norm() if config.output_norms else None,
                feed_forward_norm=norm(),
                gate_up=matrix(2 * config.feed_forward, config.hidden),
                down=matrix(config.hidden, config.feed_forward),
                output_norm=norm() if config.output_norms else None,
            )
            for _ in range(config.layers)
        ]
        self.final_norm = norm()
        if config.tied:
            self.head = Linear(self.embedding)
        else:
            shape = config.vocabulary, config.hidden
            self.head = (head or form).empty(*shape, bias=False, dtype=dtype, device=device)
        self._rotary = rotary_table(config.rope, config.positions, device)

    def convert(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace each matrix by `convert` of it, one at a time."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = replace(
                layer,
                qkv=convert(layer.qkv),
                attention_out=convert(layer.attention_out),
                gate_up=convert(layer.gate_up),
                down=convert(layer.down),
            )
        self.head = convert(self.head)

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute all layers, but of the last one only the attention."""
        hidden = embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = operations.norm(hidden, layer.input_norm, self.config.epsilon)
            heads = operations.linear(normed, layer.qkv).view(len(tokens), -1, self.config.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                self._norm_heads(heads, layer.query_norm, layer.key_norm, operations)
            attended = operations.attend(index, heads, self._rotary)
            hidden = self._add(hidden, attended, layer.attention_out, layer.attention_norm, operations)
            if layer is not self.layers[-1]:
                hidden = self._feed_forward(layer, hidden, operations)
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the last layer's feed-forward part, the final norm and the head."""
        hidden = self._feed_forward(self.layers[-1], hidden, operations)
        normed = operations.norm(hidden, self.final_norm, self.config.epsilon)
        return operations.linear(normed, self.head)

    def _feed_forward(self, layer: DecoderLayer, hidden: Tensor, operations: Operations) -> Tensor:
        normed = operations.norm(hidden, layer.feed_forward_norm, self.config.epsilon)
        gated = operations.linear_swiglu(normed, layer.gate_up)
        return self._add(hidden, gated, layer.down, layer.output_norm, operations)

    def _norm_heads(
        self, heads: Tensor, query_norm: Tensor, key_norm: Tensor, operations: Operations
    ) -> None:
        """Norm the query and key heads among `heads`, [T, heads, head_dim], in place."""
        queries, kv = self.config.query_heads, self.config.kv_heads
        for part, weight in ((heads[:, :queries], query_norm), (heads[:, queries : queries + kv], key_norm)):
            rows = part.reshape(-1, self.config.head_dim)
            part.copy_(operations.norm(rows, weight, self.config.epsilon).view(part.shape))

    def _add(
        self, hidden: Tensor, inputs: Tensor, matrix: Linear, norm: Tensor | None, operations: Operations
    ) -> Tensor:
        """Return `hidden + matrix(inputs)`, with the second normed if there is a norm for it."""
        if norm is None:
            return operations.add_linear(hidden, inputs, matrix)
        return hidden + operations.norm(operations.linear(inputs, matrix), norm, self.config.epsilon)
