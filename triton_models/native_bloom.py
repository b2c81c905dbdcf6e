"""Checkpoints of BLOOM: what their `config.json` means, and where their tensors belong.

Configuration keys and tensor names are those of the published checkpoints and of transformers'
`BloomForCausalLM`. Where a configuration leaves out a key, its defaults hold.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from triton_models.directory import ConfigNumbers
from triton_models.engine.models.bloom import Bloom, BloomConfig
from triton_models.errors import CheckpointError, UnsupportedArchitectureError
from triton_models.native import Place, SwappedRows

BLOOM_PREFIX: Final = "transformer."
"""Of names of tensors; the published checkpoints of some sizes have it, and those of others do not."""

_POSITIONS: Final = 2048
"""What all published models were trained with; a configuration need not say it, since ALiBi has no tables."""


def read_bloom_config(path: Path, raw: Mapping[str, Any]) -> BloomConfig:
    """Check the contents of the `config.json` at `path`, whose `model_type` is BLOOM's.

    Raises:
        UnsupportedArchitectureError: a variant that the forward pass does not implement.
        CheckpointError: a value is invalid.
    """
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
    return BloomConfig(
        layers=size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        vocabulary=size("vocab_size"),
        positions=numbers.size("seq_length", _POSITIONS),
        epsilon=numbers.number("layer_norm_epsilon", 1e-5),
        tied=raw.get("tie_word_embeddings") is not False,
    )


def bloom_places(model: Bloom) -> dict[str, Place]:
    """Return the model's tensors, or parts of them, by a checkpoint's names without `BLOOM_PREFIX`."""
    config = model.config
    places: dict[str, Place] = {"word_embeddings.weight": model.embedding}
    if not config.tied:
        places["lm_head.weight"] = model.head.place
    norms = {"word_embeddings_layernorm": model.embedding_norm, "ln_f": model.final_norm}
    for number, layer in enumerate(model.layers):
        prefix = f"h.{number}."
        norms[f"{prefix}input_layernorm"] = layer.input_norm
        norms[f"{prefix}post_attention_layernorm"] = layer.feed_forward_norm
        matrices = {
            f"{prefix}self_attention.dense": layer.attention_out,
            f"{prefix}mlp.dense_h_to_4h": layer.up,
            f"{prefix}mlp.dense_4h_to_h": layer.down,
        }
        for name, matrix in matrices.items():
            places[f"{name}.weight"] = matrix.place
            if matrix.bias is not None:
                places[f"{name}.bias"] = matrix.bias
        for kind, rows in (("weight", layer.qkv.place), ("bias", layer.qkv.bias)):
            if rows is not None:
                # Each head has its query, key and value one after the other.
                places[f"{prefix}self_attention.query_key_value.{kind}"] = SwappedRows(
                    rows=rows, outer=config.heads, inner=3, size=config.head_dim
                )
    for name, norm in norms.items():
        places[f"{name}.weight"], places[f"{name}.bias"] = norm.weight, norm.bias
    return places


def bloom_dropped(config: BloomConfig) -> set[str]:
    """Return the checkpoint tensors, by such names, that are skipped: copies of the embedding."""
    return {"lm_head.weight"} if config.tied else set()
