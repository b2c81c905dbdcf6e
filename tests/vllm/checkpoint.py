"""A checkpoint directory of a two-layer Llama with 1,024 tokens of context, for vLLM's random weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CONTEXT = 1024
SPECIAL = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
CALL = "<tool_call>"
"""Before a call: a token, but no special one."""
THOUGHT = "</think>"
"""Behind reasoning: the same."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tool_call>{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_checkpoint(folder: Path) -> Tokenizer:
    """Write the directory; return its tokenizer, which puts `<s>` before a text."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    for name, document in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return tokenizer


def _tokenizer() -> Tokenizer:
    """Return a byte-level BPE whose words are one to three letters."""
    ids = {token: number for number, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids[byte] = len(ids)
    merges = []
    for first, second in (("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("i", "n"), ("o", "u")):
        ids[first + second] = len(ids)
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (CALL, THOUGHT)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
