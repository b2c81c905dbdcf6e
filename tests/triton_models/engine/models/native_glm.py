"""transformers' own implementation of ChatGLM's architecture, with a checkpoint of the original layout."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GlmConfig, GlmForCausalLM


def native(
    tensors: dict[str, torch.Tensor], config: Mapping[str, Any], *, divides_positions: bool = False
) -> GlmForCausalLM:
    """Return the reference: the published names and numbers put in transformers' words.

    `divides_positions`: as ChatGLM2's code does by `rope_ratio`; all other code multiplies the base by it.
    """
    ratio = config.get("rope_ratio", 1)
    rotation = {"rope_type": "linear", "factor": ratio} if divides_positions else {"rope_type": "default"}
    heads, width = config["num_attention_heads"], config["kv_channels"]
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else heads
    model = GlmForCausalLM(
        GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            max_position_embeddings=config["seq_length"],
            rms_norm_eps=config["layernorm_epsilon"],
            attention_bias=config["add_qkv_bias"],
            tie_word_embeddings=False,
            rope_parameters={
                **rotation,
                "rope_theta": 10_000.0 * (1 if divides_positions else ratio),
                "partial_rotary_factor": 0.5,
            },
            pad_token_id=0,
        )
    )
    state = {}
    for name, tensor in tensors.items():
        if name == "transformer.rotary_pos_emb.inv_freq":
            continue
        if "query_key_value" not in name:
            state[_renamed(name)] = tensor.float()
            continue
        before, _, kind = name.rpartition(".")
        prefix = _renamed(before.removesuffix("query_key_value"))
        parts = torch.split(tensor.float(), [heads * width, groups * width, groups * width])
        for letter, part in zip("qkv", parts, strict=True):
            state[f"{prefix}{letter}_proj.{kind}"] = part
    model.load_state_dict(state)
    return model.eval()


def _renamed(name: str) -> str:
    for published, own in (
        ("transformer.embedding.word_embeddings", "model.embed_tokens"),
        ("transformer.encoder.final_layernorm", "model.norm"),
        ("transformer.output_layer", "lm_head"),
        ("transformer.encoder.layers", "model.layers"),
        ("self_attention.dense", "self_attn.o_proj"),
        ("self_attention", "self_attn"),
        ("dense_h_to_4h", "gate_up_proj"),
        ("dense_4h_to_h", "down_proj"),
    ):
        name = name.replace(published, own)
    return name
