"""Writes a random Llama, which any server loads.

`python -m bench.vllm_cpu.checkpoint FOLDER`
"""

import json
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 2048
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "100m": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
"""As large as the demo, and of 100 million parameters."""


def write_checkpoint(folder: Path, shape: str, dtype: torch.dtype) -> int:
    """Write config, tokenizer and weights; return the number of parameters."""
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    _tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "chat_template": "{% for message in messages %}{{ message.content }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")
    return sum(each.numel() for each in model.parameters())


def _tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer in which every id has a text: random weights sample all of them."""
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{number}" for number in range(vocabulary - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice([*SHAPES]), default="100m", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
def main(folder: Path, shape: str, dtype: str) -> None:
    """Write the checkpoint and print its size."""
    parameters = write_checkpoint(folder, shape, getattr(torch, dtype))
    click.echo(f"{folder}: {parameters / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
