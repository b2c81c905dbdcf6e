"""The forward pass of ChatGLM2 and ChatGLM3. Knows nothing of files, blocks or requests."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from triton_models.engine.model import Attention, KVShape

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
    """Numbers in one head."""
    padded_vocab_size: int
    seq_length: int
    layernorm_epsilon: float
    add_qkv_bias: bool
    rope_ratio: float = 1.0
    """Multiplies the base of the rotary frequencies."""

    @property
    def query_width(self) -> int:
        """Numbers in all query heads of one token."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> int:
        """Numbers in all key heads of one token."""
        return self.multi_query_group_num * self.kv_channels


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with the fused matrices as the checkpoint has them.

    Rows of `qkv` are all query heads, then key heads, then value heads; rows of `gate_up` are the gate,
    then what it gates. Norms are float32 whatever the model's dtype.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    attention_out: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


class ChatGLM:
    """A `CausalModel`: RMSNorm, rotary positions on half of each head, grouped queries, SwiGLU, untied head.

    The weights are allocated here and filled by whoever reads the checkpoint.
    """

    def __init__(self, config: ChatGLMConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype = dtype
        self._device = device

        def weights(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def norm() -> Tensor:
            return torch.empty(config.hidden_size, dtype=torch.float32, device=device)

        qkv_width = config.query_width + 2 * config.kv_width
        self.embedding = weights(config.padded_vocab_size, config.hidden_size)
        self.layers = [
            LayerWeights(
                input_norm=norm(),
                qkv=weights(qkv_width, config.hidden_size),
                qkv_bias=weights(qkv_width) if config.add_qkv_bias else None,
                attention_out=weights(config.hidden_size, config.query_width),
                post_attention_norm=norm(),
                gate_up=weights(2 * config.ffn_hidden_size, config.hidden_size),
                down=weights(config.hidden_size, config.ffn_hidden_size),
            )
            for _ in range(config.num_layers)
        ]
        self.final_norm = norm()
        self.head = weights(config.padded_vocab_size, config.hidden_size)
        self._cos, self._sin = _rotary_table(config, device)

    @property
    def vocab_size(self) -> int:
        """Width of the logits: the padded vocabulary, over which the original samples."""
        return self.config.padded_vocab_size

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence."""
        return self.config.seq_length

    @property
    def kv_shape(self) -> KVShape:
        """What the KV cache holds per token."""
        return KVShape(self.config.num_layers, self.config.multi_query_group_num, self.config.kv_channels)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """See `CausalModel`."""
        rotation = self._cos[positions, None, :], self._sin[positions, None, :]
        hidden = embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attend(
                index, layer, self._norm(hidden, layer.input_norm), rotation, attention
            )
            gate, up = linear(self._norm(hidden, layer.post_attention_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        return linear(self._norm(hidden[rows], self.final_norm), self.head)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        config = self.config
        projected = linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, config.kv_channels)
        first_key = config.num_attention_heads
        first_value = first_key + config.multi_query_group_num
        # Queries and keys stand side by side, so one rotation serves both.
        _rotate_in_place(projected[:, :first_value], *rotation)
        queries, keys = projected[:, :first_key], projected[:, first_key:first_value]
        values = projected[:, first_value:]
        return linear(attention(index, queries, keys, values).flatten(1), layer.attention_out)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(hidden.float(), weight.shape, weight, self.config.layernorm_epsilon)
        return normed.to(self._dtype)


def _rotary_table(config: ChatGLMConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [seq_length, kv_channels / 4] float32: half a head, in pairs."""
    rotary_width = config.kv_channels // 2
    exponents = torch.arange(0, rotary_width, 2, dtype=torch.float32, device=device) / rotary_width
    frequencies = 1.0 / (ROPE_BASE * config.rope_ratio) ** exponents
    positions = torch.arange(config.seq_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def _rotate_in_place(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the interleaved pairs in the first half of each head.

    `heads`: [T, heads, head_dim]; `cos`, `sin`: [T, 1, head_dim / 4]. The second half carries no position.
    """
    rotary = heads[..., : 2 * cos.shape[-1]]
    even, odd = rotary[..., 0::2].float(), rotary[..., 1::2].float()
    rotated_even, rotated_odd = even * cos - odd * sin, odd * cos + even * sin
    rotary[..., 0::2] = rotated_even.to(heads.dtype)
    rotary[..., 1::2] = rotated_odd.to(heads.dtype)
