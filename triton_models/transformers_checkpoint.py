"""Reads a checkpoint of any family that transformers implements, into transformers' own class.

Needs transformers, which nothing else here imports. No remote code runs, nothing is fetched, and only tensors
are unpickled. What cannot be served is refused before the weights are read, except layers that mix tokens
outside of attention: these only show with weights.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from triton_models.directory import ConfigNumbers, find_shards, read_json
from triton_models.engine.capacity import GIB, total_bytes
from triton_models.engine.models.transformers_model import (
    ATTENTION,
    TransformersModel,
    check_class,
    look,
    nbytes,
)
from triton_models.errors import CheckpointError, UnsupportedArchitectureError, faults_name_the_file

_UNREADABLE = "transformers cannot read it"


def load_transformers(
    directory: Path, dtype: torch.dtype, device: torch.device, *, max_context: int | None = None
) -> TransformersModel:
    """Read a checkpoint into transformers' own class on `device`, by way of the main memory.

    Args:
        directory: as published: `config.json`, and safetensors or `.bin` files.
        dtype: of weights and KV cache.
        device: where the weights go.
        max_context: the longest sequence that there will be; None: the model's own. Some models can only be
            served up to some length.

    Raises:
        UnsupportedArchitectureError: transformers has no such class, or it cannot run in our scheduler.
        CheckpointError: the checkpoint is broken, or the model does not fit on the device.
    """
    path = directory / "config.json"
    config = _read_config(path)
    made = {"dtype": dtype, "attn_implementation": ATTENTION}
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    check_class(model_class)
    with torch.device("meta"), faults_name_the_file(path, _UNREADABLE):
        shape = model_class._from_config(config, **made).eval()  # noqa: SLF001 - its only name
    _check_size(path, shape, device)
    # In 32 bits, the meta device knows no products of experts.
    found = look(shape.bfloat16())
    positions = _check_length(path, config, found.window, max_context)
    find_shards(directory)  # holds that an index names nothing outside of the directory
    with faults_name_the_file(directory, _UNREADABLE):
        causal, loaded = model_class.from_pretrained(
            directory,
            config=config,
            local_files_only=True,
            weights_only=True,
            output_loading_info=True,
            **made,
        )
    if absent := loaded["missing_keys"]:
        raise CheckpointError(f"{directory}: tensor {min(absent)!r} is missing ({len(absent)} in all)")
    model = TransformersModel(causal.to(device), found, positions=positions)
    with torch.inference_mode():
        model.check()
    return model


def _read_config(path: Path) -> PretrainedConfig:
    """Return the configuration of a model of text for which transformers has a class of its own."""
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedArchitectureError(
            f"{path}: model_type {model_type!r} is none of transformers {transformers.__version__}"
        )
    if "quantization_config" in raw:
        raise UnsupportedArchitectureError(f"{path}: quantization_config is not supported with this engine")
    with faults_name_the_file(path, _UNREADABLE):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedArchitectureError(f"{path}: model_type {model_type!r} is no causal language model")
    if config.get_text_config() is not config:
        raise UnsupportedArchitectureError(f"{path}: model_type {model_type!r} takes more than text")
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(config)):
        raise UnsupportedArchitectureError(f"{path}: rope_type 'dynamic' is not supported")
    config.pad_token_id = None  # or some classes look for padding in every step, and there is none
    return config


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of rotary positions: the model's, or each kind of layer's own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def _check_length(path: Path, config: PretrainedConfig, window: int | None, max_context: int | None) -> int:
    """Return the model's positions.

    Raises:
        UnsupportedArchitectureError: with so many tokens, it computes otherwise than our attention, or a step
            computes otherwise than each of its sequences alone.
    """
    key = "max_position_embeddings"
    positions = ConfigNumbers(path, {key: getattr(config, key, None)}).size(key)
    limits = {"sliding_window": window or _masked_window(config)}
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            # One longer sequence gives all tokens of a step other frequencies.
            limits["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    context = max_context or positions
    for key, limit in limits.items():
        if limit is not None and limit < context:
            raise UnsupportedArchitectureError(
                f"{path}: {key} {limit} is not supported with a context of {context} tokens;"
                f" max_context {limit} is"
            )
    return positions


def _masked_window(config: PretrainedConfig) -> int | None:
    """Return the window of which a mask alone tells some layers: they do not ask attention for it."""
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    # Of a class that has none, the key in a configuration means nothing.
    slides = "sliding_attention" in kinds and hasattr(type(config), "sliding_window")
    return config.sliding_window if slides else None


def _check_size(path: Path, shape: PreTrainedModel, device: torch.device) -> None:
    """Hold that a model of this shape, which is on the meta device, fits where it goes and comes through."""
    needed = nbytes(shape)
    for place in (device, torch.device("cpu")):
        if needed > (there := total_bytes(place)):
            raise CheckpointError(
                f"{path}: a model of this shape takes {needed / GIB:,.1f} GiB in {shape.dtype},"
                f" and {place} has {there / GIB:,.1f}"
            )
