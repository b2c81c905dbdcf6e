"""Small checkpoints with the files, names and values of the published glm-4-9b-chat, random weights."""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors.torch import save_file

from triton_models.directory import TOKENIZER_FILE
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.families import read_shape, tensor_places
from triton_models.text.tokenizers import PATTERN, SPECIAL_TOKENS, load_tokenizer

MERGES = 180
RANKS = 256 + MERGES

INTRODUCTION = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。"
)

TEXT = (
    "你好！今天襄阳的天气怎么样？襄阳的天气：晴，21 °C。你是一个名为 GLM 的人工智能助手。"
    'What is the weather in Berlin today? get_weather\n{"city": "Berlin", "days": 3}\n'
    '# 可用工具\n\n## get_weather\n\n{\n    "name": "get_weather",\n    "description": "Get the weather."\n}'
    "\n在调用上述函数时，请使用 Json 格式表示调用的参数。 The quick brown fox jumps over the lazy dog, "
)
"""Said of nobody and nothing: what the pairs are counted in."""

TEMPLATE = (
    "[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>\n"
    + INTRODUCTION
    + "\n\n# 可用工具{% set tools = item['tools'] %}{% for tool in tools %}"
    "{% if tool['type'] == 'function' %}"
    "\n\n## {{ tool['function']['name'] }}\n\n{{ tool['function'] | tojson(indent=4) }}\n"
    "在调用上述函数时，请使用 Json 格式表示调用的参数。{% endif %}{% endfor %}{% endif %}"
    "{% if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}\n{{ item['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As published, without the tools of the vendor's own."""

CONFIG: dict[str, Any] = {
    "_name_or_path": "THUDM/glm-4-9b-chat",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 176,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "original_rope": True,
    "padded_vocab_size": 464,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 2048,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def byte_pairs() -> list[bytes]:
    """Return the tokens by rank: every byte, then the most frequent pair of tokens, again and again."""
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(PATTERN, TEXT)]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < RANKS:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if b"".join(best) not in tokens:
            tokens.append(b"".join(best))
        words = [_merged(word, best) for word in words]
    return tokens


def _merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def write_tokenizer(directory: Path) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(byte_pairs())]
    (directory / TOKENIZER_FILE).write_text("".join(lines), encoding="ascii")
    special = SPECIAL_TOKENS["glm4"]
    _write_json(
        directory / "tokenizer_config.json",
        {
            "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
            "added_tokens_decoder": {
                str(token_id): {"content": name, "special": True}
                for token_id, name in enumerate(special, RANKS)
            },
            "additional_special_tokens": list(special),
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
            "do_lower_case": False,
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 128000,
            "padding_side": "left",
            "remove_space": False,
            "tokenizer_class": "ChatGLM4Tokenizer",
        },
    )


def write_checkpoint(
    directory: Path, *, seed: int = 7, shards: int = 3, says: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Write a whole one; returns its weights by their published names.

    With `says` the weights are not just random: the model answers everything with this, and waits for the
    result of a tool. Behind a newline it goes on as behind the first one in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    values = CONFIG | changes
    names = SPECIAL_TOKENS["glm4"]
    stops = [RANKS + names.index(name) for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    _write_json(directory / "config.json", values | {"eos_token_id": stops, "pad_token_id": stops[0]})
    _write_json(directory / "generation_config.json", {"eos_token_id": stops, "do_sample": True})
    tensors = _weights(read_shape(directory), seed)
    if says is not None:
        tokenizer = load_tokenizer(directory, "glm4")
        special = tokenizer.special_ids
        _learn(tensors, [special["<|assistant|>"], *tokenizer.encode(says), special["<|observation|>"]])
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % shards == number}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    return tensors


def _weights(config: DecoderConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return weights in the published type; the larger, the surer a model is of its next token."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config, dtype=torch.float32, device=torch.device("cpu"))
    weights = {}
    for name, place in tensor_places(model).items():
        drawn = torch.randn(place.shape, generator=generator)
        one = "layernorm" in name
        weights[name] = (1 + 0.1 * drawn if one else 0.2 * drawn).to(torch.bfloat16)
    return weights


def _learn(tensors: dict[str, torch.Tensor], sequence: list[int]) -> None:
    """Make each token of `sequence` the next one's only reason: the layers add nothing to its embedding."""
    assert len(set(sequence)) == len(sequence), "a token twice has two successors"
    for name, tensor in tensors.items():
        if name.endswith(("dense.weight", "dense_4h_to_h.weight", "output_layer.weight")):
            tensor.zero_()
    embedding = tensors["transformer.embedding.word_embeddings.weight"]
    embedding /= embedding.float().norm(dim=1, keepdim=True)
    for token, successor in pairwise(sequence):
        tensors["transformer.output_layer.weight"][successor] = 8 * embedding[token]


def _write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
