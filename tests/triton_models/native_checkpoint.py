"""Tiny checkpoints of transformers' own classes, with random weights, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_BLOOM: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 80,
    "n_layer": 3,
    "n_head": 4,
    "seq_length": 256,
}


def write_bloom(directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint of BLOOM into `directory`, and return the model that it is of."""
    return write_native(directory, "bloom", **changes)


def write_native(
    directory: Path, family: str, *, max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """Write a checkpoint of a family into `directory`, and return the model that it is of."""
    shape = _BLOOM if family == "bloom" else _SHAPE | {"sliding_window": None}
    config = AutoConfig.for_model(family, **shape | changes)
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # So large that every part matters, and norms and biases are not the ones of a new model.
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model.eval()
