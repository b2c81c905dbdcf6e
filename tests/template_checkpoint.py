"""A small checkpoint like Qwen's, with tokenizer.json and chat template, which always answers the same."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.triton_models.native_checkpoint import write_native

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
REASONING = "The weather, then."
CALL = '{"name": "get_weather", "arguments": {"city": "襄阳"}}'
ANSWER = ("<think>", REASONING, "</think>", "<tool_call>", CALL, "</tool_call>")
"""Its tokens, each one of its own."""

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "Call them within <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def template_with(mark: str) -> str:
    """Return a template without reasoning, which mentions the mark of a family's calls."""
    written, _, _ = TEMPLATE.partition("{%- if enable_thinking")
    return written.replace("<tool_call></tool_call>", mark) + "{% endif %}"


LIST_MARK = "[TOOL_CALLS]"
LISTED = (LIST_MARK, f"[{CALL}]")
"""An answer as Mistral's are, behind a special token."""
BARE = (CALL.replace("arguments", "parameters"),)
"""One as Llama 3's."""
LINES = ("get_weather\n", '{"city": "襄阳"}')
"""One as GLM-4-0414's."""


def write_tokenizer(
    directory: Path,
    template: str | None = TEMPLATE,
    *,
    answer: Sequence[str] = ANSWER,
    special: Sequence[str] = SPECIAL,
) -> Tokenizer:
    """Write a tokenizer of bytes into `directory`; without a template, it is a base model's.

    What of `answer` is not special is a token, too.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    merges = [("h", "e"), ("Ġ", "the"), ("t", "he")]
    for merged in ("he", "the", "Ġthe"):
        vocabulary[merged] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, [merges[0], merges[2], merges[1]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    texts = [name for name in answer if name not in special]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in texts])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def write_scripted(
    directory: Path,
    answer: Sequence[str] = ANSWER,
    template: str = TEMPLATE,
    *,
    special: Sequence[str] = SPECIAL,
) -> None:
    """Write a checkpoint whose model answers every conversation with the tokens of `answer`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(directory, template, answer=answer, special=special)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[-1]
    chain = [newline, *(tokenizer.token_to_id(each) for each in (*answer, "<|im_end|>"))]
    model = write_native(directory, "qwen2", max_position_embeddings=2048)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                tensor.zero_()
            elif "norm" in name:
                tensor.fill_(1.0)
            elif "embed_tokens" in name:
                tensor.normal_()
        for before, after in pairwise(chain):
            model.lm_head.weight[after] += model.model.embed_tokens.weight[before]
    model.save_pretrained(directory)
    generation = {"eos_token_id": [tokenizer.token_to_id("<|im_end|>")]}
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
