"""Checkpoints of random weights for transformers and our engine: a small BLOOM, and a ChatGLM's shape."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BloomConfig, GlmConfig, PreTrainedModel

_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

SHAPES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 50_176, "hidden_size": 1024, "n_layer": 12, "n_head": 16, "seq_length": 2048},
    "chatglm": {
        "vocab_size": 32_768,
        "hidden_size": 2048,
        "intermediate_size": 6848,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "max_position_embeddings": 2048,
        **_ENDS,
    },
}
"""Half of bloom-560m's layers with fewer ids, and half of ChatGLM3-6B's width with four layers."""

TINY: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 320, "hidden_size": 80, "n_layer": 3, "n_head": 4, "seq_length": 256},
    "chatglm": SHAPES["chatglm"]
    | {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
}
"""To try the recipe."""


def write_checkpoint(family: str, shape: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Write a checkpoint of random weights, with a tokenizer of bytes; return the model that it is of.

    The classes have ChatGLM's arithmetic, and BLOOM's, and are what our engine reads with equal weights.
    """
    config = BloomConfig(**shape) if family == "bloom" else GlmConfig(**shape)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return model.eval()
