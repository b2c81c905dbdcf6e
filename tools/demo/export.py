"""Writes a checkpoint directory in exactly the layout in which ChatGLM3 is published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from triton_models.engine.models.decoder import Decoder
from triton_models.families import tensor_places

VOCABULARY = 2_048
CONTEXT = 2_048

_CONFIG: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "auto_map": {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
    },
    "num_layers": 8,
    "padded_vocab_size": VOCABULARY,
    "hidden_size": 256,
    "ffn_hidden_size": 704,
    "kv_channels": 32,
    "num_attention_heads": 8,
    "seq_length": CONTEXT,
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "bias_dropout_fusion": True,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "apply_query_key_layer_scaling": True,
    "attention_softmax_in_fp32": True,
    "fp32_residual_connection": False,
    "original_rope": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
}
_TOKENIZER_CONFIG: dict[str, Any] = {
    "name_or_path": "chatglm3-demo",
    "remove_space": False,
    "do_lower_case": False,
    "tokenizer_class": "ChatGLMTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]},
}


def write_config(directory: Path) -> None:
    """Write `config.json` and `tokenizer_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", _CONFIG), ("tokenizer_config.json", _TOKENIZER_CONFIG)):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_weights(model: Decoder, directory: Path) -> None:
    """Write `model.safetensors` in float16: its ten mantissa bits are more precise than bfloat16's seven."""
    tensors = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in tensor_places(model).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
