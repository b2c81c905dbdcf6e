"""Checkpoints of transformers' own classes: what their `config.json` means, and where their tensors belong.

Configuration keys and tensor names are those of transformers' `GlmForCausalLM`, `Glm4ForCausalLM`,
`LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`, 4.x and 5.x. Where a
configuration leaves out a key, their defaults hold.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from triton_models.directory import ConfigNumbers
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.models.rope import Interpolation, Llama3, Rope, Yarn
from triton_models.engine.quantised import QuantisedRows, StoredWeights
from triton_models.errors import CheckpointError, UnsupportedArchitectureError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the configuration does not say of a family."""

    architecture: str
    interleaved: bool = False
    """Its rotary pairs stand side by side; otherwise, a pair's second number is half a head further on."""
    rotary_share: float = 1.0
    """Of each head, unless the configuration says otherwise."""
    head_dim: int | None = None
    """Unless the configuration says otherwise; None: the hidden width, divided among the query heads."""
    qkv_bias: bool | None = None
    """None: the configuration says, by `attention_bias`."""
    out_bias: bool = False
    """The attention's output has a bias where the configuration says `attention_bias`."""
    head_norms: bool = False
    output_norms: bool = False
    fused_gate: bool = False
    """The gate and what it gates are one tensor."""
    window: bool | None = None
    """Attention is limited to `sliding_window`, unless `use_sliding_window` says otherwise; None: never."""


_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType({
    "glm": _Family(
        architecture="GlmForCausalLM", interleaved=True, rotary_share=0.5, head_dim=128, fused_gate=True
    ),
    "glm4": _Family(
        architecture="Glm4ForCausalLM", interleaved=True, rotary_share=0.5, head_dim=128, fused_gate=True,
        output_norms=True,
    ),
    "llama": _Family(architecture="LlamaForCausalLM", out_bias=True),
    "mistral": _Family(architecture="MistralForCausalLM", qkv_bias=False, window=True),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", qkv_bias=True, window=False),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM", head_dim=128, out_bias=True, head_norms=True, window=False
    ),
})  # fmt: skip
"""By `model_type`, which is among `NATIVE_TYPES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedRows:
    """Rows of a model's matrix that a checkpoint has in another order.

    There they are [..., outer, inner, size], and in the model [..., inner, outer, size]. Stands where a
    tensor would, as a place to be filled.
    """

    rows: Tensor | QuantisedRows
    outer: int
    inner: int
    size: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(self.rows.shape)

    @property
    def nbytes(self) -> int:
        """Of the model's rows."""
        return self.rows.nbytes

    def copy_(self, source: Tensor) -> None:
        """Fill the rows from a tensor of the checkpoint."""
        self.rows.copy_(self._swapped(source))

    def store(self, rows: StoredWeights) -> None:
        """Fill the rows from ones that are quantised already."""
        if not isinstance(self.rows, QuantisedRows):
            raise TypeError("the matrix is not quantised")
        zeros = None if rows.zeros is None else self._swapped(rows.zeros)
        self.rows.store(StoredWeights(self._swapped(rows.numbers), self._swapped(rows.scales), zeros))

    def _swapped(self, source: Tensor) -> Tensor:
        parts = source.reshape(-1, self.outer, self.inner, self.size, *source.shape[1:])
        return parts.transpose(1, 2).reshape(source.shape)


Place = Tensor | QuantisedRows | SwappedRows
"""Where a checkpoint's tensor is copied to."""


def read_native_config(path: Path, raw: Mapping[str, Any]) -> DecoderConfig:
    """Check the contents of the `config.json` at `path`, whose `model_type` is among `NATIVE_TYPES`.

    Raises:
        UnsupportedArchitectureError: a variant that the forward pass does not implement.
        CheckpointError: a value is invalid.
    """
    family = _FAMILIES[raw["model_type"]]
    _refuse_variants(path, raw, family)
    numbers = ConfigNumbers(path, raw)
    hidden, heads = numbers.size("hidden_size"), numbers.size("num_attention_heads")
    kv_heads = numbers.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = numbers.size("head_dim", family.head_dim or hidden // heads)
    positions = numbers.size("max_position_embeddings")
    rope, positions = _rope(path, raw, family, head_dim, positions)
    _refuse_windows(path, raw, family, positions)
    bias = raw.get("attention_bias")
    bias = family.interleaved if bias is None else bool(bias)  # GLM's classes have biases by default
    return DecoderConfig(
        layers=numbers.size("num_hidden_layers"),
        hidden=hidden,
        feed_forward=numbers.size("intermediate_size"),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=numbers.size("vocab_size"),
        positions=positions,
        epsilon=numbers.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=family.out_bias and bias,
        head_norms=family.head_norms,
        output_norms=family.output_norms,
        tied=raw.get("tie_word_embeddings") is True,
    )


def native_places(model: Decoder, model_type: str) -> dict[str, Place]:
    """Return the model's tensors, or parts of them, each under the name that it has in a checkpoint."""
    family, config = _FAMILIES[model_type], model.config
    places: dict[str, Place] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.final_norm,
    }
    if not config.tied:
        places["lm_head.weight"] = model.head.place
    widths = [config.query_width, *[config.kv_heads * config.head_dim] * 2]

    def heads(rows: Tensor | QuantisedRows) -> Place:
        """Return the place of heads of which a checkpoint has all first numbers of pairs, then all second."""
        return rows if family.interleaved else SwappedRows(rows=rows, outer=2, inner=config.head_dim // 2)

    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        attention, feed_forward = f"{prefix}self_attn.", f"{prefix}mlp."
        for kind, tensor in (("weight", layer.qkv.place), ("bias", layer.qkv.bias)):
            if tensor is not None:
                queries, keys, values = tensor.split(widths)
                places[f"{attention}q_proj.{kind}"] = heads(queries)
                places[f"{attention}k_proj.{kind}"] = heads(keys)
                places[f"{attention}v_proj.{kind}"] = values
        places[f"{attention}o_proj.weight"] = layer.attention_out.place
        if layer.attention_out.bias is not None:
            places[f"{attention}o_proj.bias"] = layer.attention_out.bias
        if layer.query_norm is not None and layer.key_norm is not None:
            places[f"{attention}q_norm.weight"] = heads(layer.query_norm)
            places[f"{attention}k_norm.weight"] = heads(layer.key_norm)
        if family.fused_gate:
            places[f"{feed_forward}gate_up_proj.weight"] = layer.gate_up.place
        else:
            gate, up = layer.gate_up.place.split([config.feed_forward] * 2)
            places[f"{feed_forward}gate_proj.weight"], places[f"{feed_forward}up_proj.weight"] = gate, up
        places[f"{feed_forward}down_proj.weight"] = layer.down.place
        places[f"{prefix}input_layernorm.weight"] = layer.input_norm
        places[f"{prefix}post_attention_layernorm.weight"] = layer.feed_forward_norm
        if layer.attention_norm is not None and layer.output_norm is not None:
            places[f"{prefix}post_self_attn_layernorm.weight"] = layer.attention_norm
            places[f"{prefix}post_mlp_layernorm.weight"] = layer.output_norm
    return places


def native_dropped(config: DecoderConfig) -> set[str]:
    """Return the checkpoint tensors that are skipped: copies, and what the model computes itself."""
    frequencies = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(config.layers)}
    return frequencies | ({"lm_head.weight"} if config.tied else set())


def _refuse_variants(path: Path, raw: Mapping[str, Any], family: _Family) -> None:
    def refuse(key: str, why: str = "is not supported") -> None:
        raise UnsupportedArchitectureError(f"{path}: {key} {raw.get(key)!r} {why}")

    if raw.get("architectures") not in (None, [family.architecture]):
        refuse("architectures", f"is not supported for model_type {raw['model_type']!r}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act")
    if raw.get("mlp_bias"):
        refuse("mlp_bias")


def _refuse_windows(path: Path, raw: Mapping[str, Any], family: _Family, positions: int) -> None:
    """Refuse attention that is limited to less than the `positions` that rotations reach."""
    window = raw.get("sliding_window")
    if family.window is None or window is None or not raw.get("use_sliding_window", family.window):
        return
    if not isinstance(window, int) or window < positions:
        raise UnsupportedArchitectureError(
            f"{path}: sliding_window {window!r} is not supported, since it is less than the {positions}"
            " positions"
        )


def _rope(
    path: Path, raw: Mapping[str, Any], family: _Family, head_dim: int, positions: int
) -> tuple[Rope, int]:
    """Return the rotary frequencies, and how many positions they are for."""
    found = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    for key in ("rope_theta", "partial_rotary_factor"):
        if raw.get(key) is not None:
            found.setdefault(key, raw[key])
    numbers = ConfigNumbers(path, found)
    share = numbers.number("partial_rotary_factor", family.rotary_share)
    width = int(head_dim * share)
    if width % 2 or (width != head_dim and not family.interleaved) or width > head_dim:
        raise UnsupportedArchitectureError(
            f"{path}: a partial_rotary_factor of {share:g}, with heads of {head_dim}, is not supported"
        )
    kind = found.get("rope_type", found.get("type", "default"))
    original = numbers.number("original_max_position_embeddings", positions)
    scaling: Interpolation | Llama3 | Yarn | None = None
    match kind:
        case "default":
            pass
        case "linear":
            scaling = Interpolation(factor=numbers.number("factor"))
            positions = int(positions * scaling.factor)
        case "llama3":
            scaling = Llama3(
                factor=numbers.number("factor"),
                low=numbers.number("low_freq_factor"),
                high=numbers.number("high_freq_factor"),
                original=original,
            )
        case "yarn":
            scaling = _yarn(numbers, original)
            positions = max(positions, int(original * scaling.factor))
        case _:
            raise UnsupportedArchitectureError(f"{path}: rope_type {kind!r} is not supported")
    return Rope(pairs=width // 2, base=numbers.number("rope_theta", 10_000.0), scaling=scaling), positions


def _yarn(numbers: ConfigNumbers, original: float) -> Yarn:
    factor = numbers.number("factor")

    def sharpening(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    raw = numbers.raw
    if raw.get("attention_factor") is not None:
        amplitude = numbers.number("attention_factor")
    elif raw.get("mscale") and raw.get("mscale_all_dim"):
        amplitude = sharpening(numbers.number("mscale")) / sharpening(numbers.number("mscale_all_dim"))
    else:
        amplitude = sharpening(1.0)
    return Yarn(
        factor=factor,
        original=original,
        fast=numbers.number("beta_fast", 32.0),
        slow=numbers.number("beta_slow", 1.0),
        amplitude=amplitude,
        truncate=raw.get("truncate") is not False,
    )
