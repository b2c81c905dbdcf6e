"""The families of checkpoints: what each one's `config.json` means, and where its tensors belong in a model.

* ChatGLM2, ChatGLM3 and GLM-4 in their original form: each key means what it means in
  `configuration_chatglm.py` and `modeling_chatglm.py`.
* transformers' `GlmForCausalLM`, `Glm4ForCausalLM`, `LlamaForCausalLM`, `MistralForCausalLM`,
  `Qwen2ForCausalLM`, `Qwen3ForCausalLM` and `BloomForCausalLM`, 4.x and 5.x, which the published checkpoints
  of BLOOM are of, too. Where a configuration leaves out a key, their defaults hold.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from triton_models.directory import (
    BLOOM_TYPE,
    CHATGLM_TYPE,
    ConfigNumbers,
    check_model_type,
    format_evidence,
    read_json,
)
from triton_models.engine.linear import Linear
from triton_models.engine.models import Norm
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.models.positions import Interpolation, Llama3, Rope, Yarn
from triton_models.engine.quantised import QuantisedRows, StoredWeights
from triton_models.errors import CheckpointError, UnsupportedArchitectureError

log = logging.getLogger(__name__)

_ROPE_BASE: Final = 10_000.0

_IMPLEMENTED: Final[Mapping[str, object]] = MappingProxyType({
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "fp32_residual_connection": False,
    "interleaved_qkv": False,
    "tie_word_embeddings": False,
    "pre_seq_len": None,
})  # fmt: skip
"""For each key of ChatGLM's, the only value that the forward pass implements, which is also the default."""

_BLOOM_POSITIONS: Final = 2048
"""What all published models were trained with; a configuration need not say it, since ALiBi has no tables."""


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


@dataclass(frozen=True, slots=True)
class Names:
    """What a family's checkpoints call the tensors of a model, or parts of them."""

    places: dict[str, Place]
    skipped: frozenset[str]
    """Tensors that are not read: copies, and what the model computes itself."""
    prefix: str = ""
    """What some checkpoints put before all names."""


def read_shape(directory: Path, chat_format: str | None = None) -> DecoderConfig:
    """Read and check `config.json` of a checkpoint of any family.

    `chat_format`: the option `format`; None: the directory's files or its name say.

    Raises:
        UnsupportedArchitectureError: the directory holds another kind of model, or a variant that the forward
            pass does not implement.
        CheckpointError: the file is missing or broken, or a value is invalid.
    """
    path = directory / "config.json"
    raw = read_json(path)
    check_model_type(path, raw)
    if raw["model_type"] == CHATGLM_TYPE:
        # ChatGLM2's code divides positions by its ratio; all later code multiplies the frequencies' base.
        found = chat_format or format_evidence(directory)
        return _chatglm_config(path, raw, divides_positions=found == "chatglm2")
    return _bloom_config(path, raw) if raw["model_type"] == BLOOM_TYPE else _native_config(path, raw)


def tensor_names(model: Decoder, model_type: str) -> Names:
    """Return what checkpoints of this `model_type` call the tensors of a model."""
    if model_type == CHATGLM_TYPE:
        return Names(_chatglm_places(model), frozenset({"transformer.rotary_pos_emb.inv_freq"}))
    copies = frozenset({"lm_head.weight"} if model.config.tied else ())
    if model_type == BLOOM_TYPE:
        # The published checkpoints of some sizes have the prefix, and those of others do not.
        return Names(_bloom_places(model), copies, "transformer.")
    layers = range(model.config.layers)
    frequencies = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in layers}
    return Names(_native_places(model, _FAMILIES[model_type]), copies | frequencies)


def tensor_places(model: Decoder) -> dict[str, Tensor]:
    """Return a model's tensors that are not quantised, by the names of ChatGLM's original form."""
    return {name: place for name, place in _chatglm_places(model).items() if isinstance(place, Tensor)}


def _chatglm_config(path: Path, raw: Mapping[str, Any], *, divides_positions: bool) -> DecoderConfig:
    for key, implemented in _IMPLEMENTED.items():
        value = raw.get(key)
        # In the original, JSON's null means the default, and 0 means false.
        if value is not None and bool(value) != bool(implemented):
            raise UnsupportedArchitectureError(f"{path}: {key} {value!r} is not supported")
    numbers = ConfigNumbers(path, raw)
    heads, width = numbers.size("num_attention_heads"), numbers.size("kv_channels")
    grouped = raw.get("multi_query_attention") is True
    kv_heads = numbers.size("multi_query_group_num") if grouped else heads
    ratio = numbers.number("rope_ratio", 1.0)
    if heads % kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {heads} is no multiple of multi_query_group_num {kv_heads}"
        )
    if width % 4:
        raise CheckpointError(f"{path}: kv_channels {width} is no multiple of 4, which rotary pairs need")
    return DecoderConfig(
        layers=numbers.size("num_layers"),
        hidden=numbers.size("hidden_size"),
        feed_forward=numbers.size("ffn_hidden_size"),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        vocabulary=numbers.size("padded_vocab_size"),
        positions=numbers.size("seq_length"),
        epsilon=numbers.number("layernorm_epsilon", 1e-5),
        rope=Rope(
            share=0.5,
            base=_ROPE_BASE * (1.0 if divides_positions else ratio),
            scaling=Interpolation(factor=ratio) if divides_positions and ratio != 1 else None,
        ),
        qkv_bias=raw.get("add_qkv_bias") is True,
    )


def _chatglm_places(model: Decoder) -> dict[str, Place]:
    places: dict[str, Place] = {
        "transformer.embedding.word_embeddings.weight": model.embedding,
        "transformer.encoder.final_layernorm.weight": model.final_norm.weight,
        "transformer.output_layer.weight": model.head.place,
    }
    for number, layer in enumerate(model.layers):
        prefix = f"transformer.encoder.layers.{number}."
        places |= _parts(prefix + "input_layernorm", layer.input_norm)
        places |= _parts(prefix + "self_attention.query_key_value", layer.qkv)
        places |= _parts(prefix + "self_attention.dense", layer.attention_out)
        places |= _parts(prefix + "post_attention_layernorm", layer.feed_forward_norm)
        places |= _parts(prefix + "mlp.dense_h_to_4h", layer.up)
        places |= _parts(prefix + "mlp.dense_4h_to_h", layer.down)
    return places


def _bloom_config(path: Path, raw: Mapping[str, Any]) -> DecoderConfig:
    if raw.get("architectures") not in (None, ["BloomForCausalLM"], ["BloomModel"]):
        raise UnsupportedArchitectureError(f"{path}: architectures {raw['architectures']!r} is not supported")
    if raw.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedArchitectureError(
            f"{path}: apply_residual_connection_post_layernorm True is not supported"
        )
    numbers = ConfigNumbers(path, raw)

    def size(*keys: str) -> int:
        """Return the number under the first of the keys that is there."""
        return numbers.size(next((key for key in keys if raw.get(key) is not None), keys[0]))

    hidden, heads = size("hidden_size", "n_embed"), size("n_head", "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"{path}: hidden_size {hidden} is no multiple of n_head {heads}")
    return DecoderConfig(
        layers=size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        feed_forward=4 * hidden,
        query_heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocabulary=size("vocab_size"),
        positions=numbers.size("seq_length", _BLOOM_POSITIONS),
        epsilon=numbers.number("layer_norm_epsilon", 1e-5),
        rope=None,
        qkv_bias=True,
        out_bias=True,
        feed_forward_bias=True,
        gated=False,
        layer_norms=True,
        tied=raw.get("tie_word_embeddings") is not False,
    )


def _bloom_places(model: Decoder) -> dict[str, Place]:
    config = model.config
    places: dict[str, Place] = {"word_embeddings.weight": model.embedding}
    places |= _parts("word_embeddings_layernorm", model.embedding_norm)
    places |= _parts("ln_f", model.final_norm)
    if not config.tied:
        places["lm_head.weight"] = model.head.place
    for number, layer in enumerate(model.layers):
        prefix = f"h.{number}."
        for name, rows in _parts(prefix + "self_attention.query_key_value", layer.qkv).items():
            # Each head has its query, key and value one after the other.
            places[name] = SwappedRows(rows=rows, outer=config.query_heads, inner=3, size=config.head_dim)
        places |= _parts(prefix + "self_attention.dense", layer.attention_out)
        places |= _parts(prefix + "mlp.dense_h_to_4h", layer.up)
        places |= _parts(prefix + "mlp.dense_4h_to_h", layer.down)
        places |= _parts(prefix + "input_layernorm", layer.input_norm)
        places |= _parts(prefix + "post_attention_layernorm", layer.feed_forward_norm)
    return places


def _native_config(path: Path, raw: Mapping[str, Any]) -> DecoderConfig:
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
    positions = _seen_by_all(path, raw, family, positions)
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


def _native_places(model: Decoder, family: _Family) -> dict[str, Place]:
    config = model.config
    places: dict[str, Place] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.final_norm.weight,
    }
    if not config.tied:
        places["lm_head.weight"] = model.head.place

    def heads(rows: Tensor | QuantisedRows) -> Place:
        """Return the place of heads of which a checkpoint has all first numbers of pairs, then all second."""
        return rows if family.interleaved else SwappedRows(rows=rows, outer=2, inner=config.head_dim // 2)

    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        attention, feed_forward = f"{prefix}self_attn.", f"{prefix}mlp."
        for kind, rows in _parts("", layer.qkv).items():
            queries, keys, values = rows.split([config.query_width, config.kv_width, config.kv_width])
            places[f"{attention}q_proj{kind}"] = heads(queries)
            places[f"{attention}k_proj{kind}"] = heads(keys)
            places[f"{attention}v_proj{kind}"] = values
        places |= _parts(f"{attention}o_proj", layer.attention_out)
        if layer.query_norm is not None and layer.key_norm is not None:
            places[f"{attention}q_norm.weight"] = heads(layer.query_norm.weight)
            places[f"{attention}k_norm.weight"] = heads(layer.key_norm.weight)
        if family.fused_gate:
            places |= _parts(f"{feed_forward}gate_up_proj", layer.up)
        else:
            gate, up = layer.up.place.split([config.feed_forward] * 2)
            places[f"{feed_forward}gate_proj.weight"], places[f"{feed_forward}up_proj.weight"] = gate, up
        places |= _parts(f"{feed_forward}down_proj", layer.down)
        places |= _parts(f"{prefix}input_layernorm", layer.input_norm)
        places |= _parts(f"{prefix}post_attention_layernorm", layer.feed_forward_norm)
        places |= _parts(f"{prefix}post_self_attn_layernorm", layer.attention_norm)
        places |= _parts(f"{prefix}post_mlp_layernorm", layer.output_norm)
    return places


def _parts(name: str, whole: Linear | Norm | None) -> dict[str, Tensor | QuantisedRows]:
    """Return the places of a matrix's or norm's weight and bias, as far as there are any."""
    if whole is None:
        return {}
    weight = whole.place if isinstance(whole, Linear) else whole.weight
    places = {f"{name}.weight": weight}
    if whole.bias is not None:
        places[f"{name}.bias"] = whole.bias
    return places


def _refuse_variants(path: Path, raw: Mapping[str, Any], family: _Family) -> None:
    def refuse(key: str, why: str = "is not supported") -> None:
        raise UnsupportedArchitectureError(f"{path}: {key} {raw.get(key)!r} {why}")

    if raw.get("architectures") not in (None, [family.architecture]):
        refuse("architectures", f"is not supported for model_type {raw['model_type']!r}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act")
    if raw.get("mlp_bias"):
        refuse("mlp_bias")


def _seen_by_all(path: Path, raw: Mapping[str, Any], family: _Family, positions: int) -> int:
    """Return how many of the `positions` that rotations reach a token can have behind it and see them all.

    A model whose attention is limited to a window computes as ours does as long as everything is within it.
    """
    if family.window is None or raw.get("sliding_window") is None:
        return positions
    if not raw.get("use_sliding_window", family.window):
        return positions
    window = ConfigNumbers(path, raw).size("sliding_window")
    if window < positions:
        log.warning(
            "the context is %d tokens, the model's sliding window, of %d positions", window, positions
        )
    return min(window, positions)


def _rope(
    path: Path, raw: Mapping[str, Any], family: _Family, head_dim: int, positions: int
) -> tuple[Rope, int]:
    """Return the rotary frequencies, and how many positions they are for."""
    # What model cards tell to add for a longer context is `rope_scaling`, whatever wrote the file.
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        each = raw.get(key) or {}
        if not isinstance(each, Mapping):
            raise CheckpointError(f"{path}: {key} must be an object, not {each!r}")
        found |= {**each, "rope_type": each.get("rope_type", each.get("type", found.get("rope_type")))}
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
    kind = found["rope_type"] or "default"
    original = numbers.number("original_max_position_embeddings", positions)
    scaling: Interpolation | Llama3 | Yarn | None = None
    amplitude = 1.0
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
            scaling = Yarn(
                factor=numbers.number("factor"),
                original=original,
                fast=numbers.number("beta_fast", 32.0),
                slow=numbers.number("beta_slow", 1.0),
                truncate=found.get("truncate") is not False,
            )
            positions = max(positions, int(original * scaling.factor))
            amplitude = _yarn_amplitude(numbers, scaling.factor)
        case _:
            raise UnsupportedArchitectureError(f"{path}: rope_type {kind!r} is not supported")
    base = numbers.number("rope_theta", _ROPE_BASE)
    return Rope(share=share, base=base, scaling=scaling, amplitude=amplitude), positions


def _yarn_amplitude(numbers: ConfigNumbers, factor: float) -> float:
    def sharpening(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if numbers.raw.get("attention_factor") is not None:
        return numbers.number("attention_factor")
    if numbers.raw.get("mscale") and numbers.raw.get("mscale_all_dim"):
        return sharpening(numbers.number("mscale")) / sharpening(numbers.number("mscale_all_dim"))
    return sharpening(1.0)
