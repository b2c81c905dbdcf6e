"""The forward pass of ChatGLM2, ChatGLM3 and GLM-4. Knows nothing of files, blocks or requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from triton_models.engine.linear import Linear
from triton_models.engine.models import KVShape, Operations, Rotary

ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatGLMConfig:
    """The numbers that shape the model, by the names of the original `config.json`."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    multi_query_group_num: int
    """KV heads; the number of attention heads where the checkpoint has no multi-query attention."""
    kv_channels: int
    """Width of one head."""
    padded_vocab_size: int
    seq_length: int
    layernorm_epsilon: float
    add_qkv_bias: bool
    rope_ratio: float = 1.0
    """Multiplies the base of the rotary frequencies."""
    position_ratio: float = 1.0
    """Divides the positions: ChatGLM2's way to a longer context."""

    @property
    def query_width(self) -> int:
        """Width of all query heads of one token."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> int:
        """Width of all key heads of one token; its value heads have the same."""
        return self.multi_query_group_num * self.kv_channels

    def nbytes(
        self, dtype: torch.dtype, form: type[Linear] = Linear, head: type[Linear] | None = None
    ) -> int:
        """Return the bytes that a model of this shape allocates: weights, norms and rotary tables."""
        qkv_width = self.query_width + 2 * self.kv_width
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        shapes = ((qkv_width, hidden), (hidden, self.query_width), (2 * ffn, hidden), (hidden, ffn))
        layer = sum(form.bytes_for(*shape, dtype) for shape in shapes)
        layer += qkv_width * dtype.itemsize if self.add_qkv_bias else 0
        embedding_and_head = (
            each.bytes_for(self.padded_vocab_size, hidden, dtype) for each in (Linear, head or form)
        )
        norms = (2 * self.num_layers + 1) * hidden
        rotary = 2 * self.seq_length * (self.kv_channels // 4)
        return sum(embedding_and_head) + self.num_layers * layer + (norms + rotary) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with the fused matrices as the checkpoint has them.

    Rows of `qkv` are all query heads, then key heads, then value heads; rows of `gate_up` are the gate, then
    the projection that it gates. Norms are float32 whatever the model's dtype.
    """

    input_norm: Tensor
    qkv: Linear
    attention_out: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class ChatGLM:
    """A `CausalModel`: RMSNorm, rotary positions on half of each head, grouped queries, SwiGLU, untied head.

    The weights are allocated here, matrices in the `form` given (the output head in another one if `head`
    says so), and filled by whoever reads the checkpoint.
    """

    def __init__(
        self,
        config: ChatGLMConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: type[Linear] = Linear,
        head: type[Linear] | None = None,
    ) -> None:
        self.config = config
        # From the padded vocabulary the original code samples, too.
        self.vocab_size = config.padded_vocab_size
        self.max_positions = config.seq_length
        self.kv_shape = KVShape(config.num_layers, config.multi_query_group_num, config.kv_channels)
        self.query_heads = config.num_attention_heads
        self.dtype = dtype
        self.device = device

        def weights(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def matrix(rows: int, columns: int, *, bias: bool = False) -> Linear:
            return form.empty(rows, columns, bias=bias, dtype=dtype, device=device)

        def norm() -> Tensor:
            return torch.empty(config.hidden_size, dtype=torch.float32, device=device)

        qkv_width = config.query_width + 2 * config.kv_width
        self.embedding = weights(config.padded_vocab_size, config.hidden_size)
        self.layers = [
            LayerWeights(
                input_norm=norm(),
                qkv=matrix(qkv_width, config.hidden_size, bias=config.add_qkv_bias),
                attention_out=matrix(config.hidden_size, config.query_width),
                post_attention_norm=norm(),
                gate_up=matrix(2 * config.ffn_hidden_size, config.hidden_size),
                down=matrix(config.hidden_size, config.ffn_hidden_size),
            )
            for _ in range(config.num_layers)
        ]
        self.final_norm = norm()
        self.head = (head or form).empty(
            config.padded_vocab_size, config.hidden_size, bias=False, dtype=dtype, device=device
        )
        self._rotary = _rotary_table(config, device)

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
        epsilon = self.config.layernorm_epsilon
        hidden = embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = operations.norm(hidden, layer.input_norm, epsilon)
            projected = operations.linear(normed, layer.qkv)
            heads = projected.view(len(tokens), -1, self.config.kv_channels)
            attended = operations.attend(index, heads, self._rotary)
            hidden = operations.add_linear(hidden, attended, layer.attention_out)
            if layer is not self.layers[-1]:
                hidden = self._feed_forward(layer, hidden, operations)
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the last layer's feed-forward part, the final norm and the head."""
        hidden = self._feed_forward(self.layers[-1], hidden, operations)
        normed = operations.norm(hidden, self.final_norm, self.config.layernorm_epsilon)
        return operations.linear(normed, self.head)

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor, operations: Operations) -> Tensor:
        normed = operations.norm(hidden, layer.post_attention_norm, self.config.layernorm_epsilon)
        gated = operations.linear_swiglu(normed, layer.gate_up)
        return operations.add_linear(hidden, gated, layer.down)


def _rotary_table(config: ChatGLMConfig, device: torch.device) -> Rotary:
    """Return tables of [seq_length, kv_channels / 4]: half of each head is rotated, in pairs."""
    rotary_width = config.kv_channels // 2
    exponents = torch.arange(0, rotary_width, 2, dtype=torch.float32, device=device) / rotary_width
    frequencies = 1.0 / (ROPE_BASE * config.rope_ratio) ** exponents
    positions = torch.arange(config.seq_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions / config.position_ratio, frequencies)
    return Rotary(angles.cos(), angles.sin())
