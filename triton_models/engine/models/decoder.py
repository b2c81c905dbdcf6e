"""The forward pass of every family: ChatGLM and GLM of all versions, Llama, Mistral, Qwen2, Qwen3 and BLOOM.

They differ in a few switches (`DecoderConfig`). All that rotate do it by interleaved pairs here, whatever
their checkpoints do: who reads a checkpoint brings the rows of queries and keys into that order, which
changes no product of a query and a key. Knows nothing of files, blocks or requests.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from triton_models.engine.linear import Linear
from triton_models.engine.models import KVShape, Next, Norm, Operations
from triton_models.engine.models.positions import Rope, alibi, rotary_table


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
    rope: Rope | None
    """None: scores fall with the distance (`Alibi`)."""
    qkv_bias: bool = False
    out_bias: bool = False
    """The attention's output has a bias."""
    feed_forward_bias: bool = False
    gated: bool = True
    """The feed-forward part is SwiGLU; otherwise, GELU."""
    layer_norms: bool = False
    """Norms are LayerNorms, and the embedding has one, too; otherwise, RMSNorms."""
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
    def kv_width(self) -> int:
        """Width of all key heads of one token; its value heads have the same."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int, bool]]:
        """Of each matrix of a layer: its rows, its columns, and whether it has a bias."""
        hidden, width = self.hidden, self.feed_forward
        return {
            "qkv": (self.query_width + 2 * self.kv_width, hidden, self.qkv_bias),
            "attention_out": (hidden, self.query_width, self.out_bias),
            "up": (2 * width if self.gated else width, hidden, self.feed_forward_bias),
            "down": (hidden, width, self.feed_forward_bias),
        }

    def nbytes(
        self, dtype: torch.dtype, form: type[Linear] = Linear, head: type[Linear] | None = None
    ) -> int:
        """Return the bytes that a model of this shape allocates: weights, norms, and what positions need."""
        layer = sum(
            form.bytes_for(rows, columns, dtype) + bias * rows * dtype.itemsize
            for rows, columns, bias in self.matrices.values()
        )
        ends = (Linear,) if self.tied else (Linear, head or form)
        weights = sum(each.bytes_for(self.vocabulary, self.hidden, dtype) for each in ends)
        norms = (self.layers * (4 if self.output_norms else 2) + 1 + self.layer_norms) * self.hidden
        norms += self.layers * self.head_norms * 2 * self.head_dim
        norms *= 2 if self.layer_norms else 1
        tables = self.query_heads
        if self.rope is not None:
            tables = 2 * self.positions * self.rope.pairs(self.head_dim)
        return weights + self.layers * layer + (norms + tables) * torch.float32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer; norms are None where the model has none.

    Rows of `qkv` are all query heads, then key heads, then value heads; rows of a gated `up` are the gate,
    then the projection that it gates.
    """

    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    attention_out: Linear
    attention_norm: Norm | None
    feed_forward_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm | None


class Decoder:
    """A `CausalModel`. The weights are allocated here and filled by whoever reads the checkpoint.

    Matrices are in the `form` given, but for the embedding, a head that is the same, and one in the form
    `head`. `stored` is the dtype of plain ones and of the embedding, if it is not `dtype`, in which all else
    is computed: only products that are made for it take such matrices.

    Attributes:
        nbytes: what it allocates.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: type[Linear] = Linear,
        head: type[Linear] | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        self.config = config
        # With ChatGLM, the padded one, from which the original code samples, too.
        self.vocab_size = config.vocabulary
        self.max_positions = config.positions
        self.kv_shape = KVShape(config.layers, config.kv_heads, config.head_dim)
        self.query_heads = config.query_heads
        self.dtype = dtype
        self.device = device
        stored = stored or dtype
        self.nbytes = config.nbytes(stored, form, head)

        def matrix(name: str) -> Linear:
            rows, columns, bias = config.matrices[name]
            return form.empty(rows, columns, bias=bias, dtype=stored, device=device)

        def norm(width: int = config.hidden) -> Norm:
            weight = torch.empty(width, dtype=torch.float32, device=device)
            bias = torch.empty_like(weight) if config.layer_norms else None
            return Norm(weight, bias, config.epsilon)

        self.embedding = torch.empty((config.vocabulary, config.hidden), dtype=stored, device=device)
        self.embedding_norm = norm() if config.layer_norms else None
        self.layers = [
            DecoderLayer(
                input_norm=norm(),
                qkv=matrix("qkv"),
                query_norm=norm(config.head_dim) if config.head_norms else None,
                key_norm=norm(config.head_dim) if config.head_norms else None,
                attention_out=matrix("attention_out"),
                attention_norm=norm() if config.output_norms else None,
                feed_forward_norm=norm(),
                up=matrix("up"),
                down=matrix("down"),
                output_norm=norm() if config.output_norms else None,
            )
            for _ in range(config.layers)
        ]
        self.final_norm = norm()
        if config.tied:
            self.head = Linear(self.embedding)
        else:
            shape = config.vocabulary, config.hidden
            self.head = (head or form).empty(*shape, bias=False, dtype=stored, device=device)
        self.leans = config.rope is None
        self.positions = (
            alibi(config.query_heads, device)
            if config.rope is None
            else rotary_table(config.rope, config.head_dim, config.positions, device)
        )

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
        hidden = embedding(tokens, self.embedding).to(self.dtype)
        if self.embedding_norm is not None:
            hidden = operations.norm(hidden, self.embedding_norm)
        for index, layer in enumerate(self.layers):
            attends = layer.query_norm is None
            projected = operations.linear(hidden, layer.qkv, norm=layer.input_norm, attends=attends)
            heads = projected.view(len(tokens), -1, self.config.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                self._norm_heads(heads, layer.query_norm, layer.key_norm, operations)
            attended = operations.attend(index, heads, self.positions, then=Next(layer.attention_out))
            last = layer is self.layers[-1]
            # Of the last layer, often only some rows go on: `logits` does the same with all of them.
            then = None if last else Next(layer.up, layer.feed_forward_norm)
            if layer.attention_norm is None:
                hidden = operations.add_linear(hidden, attended, layer.attention_out, then=then)
            else:
                part = operations.linear(attended, layer.attention_out)
                hidden = hidden + operations.norm(part, layer.attention_norm)
            if not last:
                following = self.layers[index + 1]
                then = Next(following.qkv, following.input_norm)
                hidden = self._feed_forward(layer, hidden, operations, then=then)
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the last layer's feed-forward part, the final norm and the head."""
        then = Next(self.head, self.final_norm)
        hidden = self._feed_forward(self.layers[-1], hidden, operations, then=then)
        return operations.linear(hidden, self.head, norm=self.final_norm)

    def _feed_forward(
        self, layer: DecoderLayer, hidden: Tensor, operations: Operations, *, then: Next
    ) -> Tensor:
        part = operations.feed_forward(
            hidden,
            layer.up,
            layer.down,
            norm=layer.feed_forward_norm,
            gated=self.config.gated,
            add=layer.output_norm is None,
            then=then if layer.output_norm is None else None,
        )
        return part if layer.output_norm is None else hidden + operations.norm(part, layer.output_norm)

    def _norm_heads(self, heads: Tensor, query_norm: Norm, key_norm: Norm, operations: Operations) -> None:
        """Norm the query and key heads among `heads`, [T, heads, head_dim], in place."""
        queries, kv = self.config.query_heads, self.config.kv_heads
        for part, norm in ((heads[:, :queries], query_norm), (heads[:, queries : queries + kv], key_norm)):
            rows = part.reshape(-1, self.config.head_dim)
            part.copy_(operations.norm(rows, norm).view(part.shape))
