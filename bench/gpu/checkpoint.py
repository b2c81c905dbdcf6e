"""Writes a checkpoint directory in the layout of ChatGLM3-6B, with random weights, to measure its speed."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from bench.engine import random_model
from bench.gpu.tokenizer import tokenizer_model
from triton_models.checkpoint import tensor_places
from triton_models.engine.models.chatglm import ChatGLMConfig
from triton_models.text.tokenizers import SPECIAL_TOKENS, TOKENIZER_FILE

_SPECIAL = len(SPECIAL_TOKENS["chatglm3"])
"""Number of special ids, which follow the pieces."""

CHATGLM3_6B = ChatGLMConfig(
    num_layers=28,
    hidden_size=4096,
    ffn_hidden_size=13696,
    num_attention_heads=32,
    multi_query_group_num=2,
    kv_channels=128,
    padded_vocab_size=65_024,
    seq_length=8192,
    layernorm_epsilon=1e-5,
    add_qkv_bias=True,
)

GLM4_9B = replace(CHATGLM3_6B, num_layers=40, padded_vocab_size=151_552, rope_ratio=500.0)
"""Its original form, `glm-4-9b`."""

SHAPES = {"6b": CHATGLM3_6B, "9b": GLM4_9B}
"""By the names that commands give them."""

TINY = replace(
    CHATGLM3_6B, num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, kv_channels=16
)
"""The same vocabulary and context, but almost no arithmetic."""

_SHARD_BYTES = 2 * 2**30


def write_checkpoint(directory: Path, config: ChatGLMConfig, device: torch.device) -> int:
    """Write a checkpoint in bfloat16 with weights drawn on `device`; return the weights' size in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    # ChatGLM3's own tokenizer has 64,789 pieces; about 230 further ids pad the vocabulary and are never
    # sampled. With random weights every id is sampled, and one without text would merge two chunks of a
    # stream. So here nearly all ids have text.
    (directory / TOKENIZER_FILE).write_bytes(tokenizer_model(config.padded_vocab_size - _SPECIAL))
    numbers = asdict(config)
    rope_ratio = numbers.pop("rope_ratio")
    documents = {
        "config.json": {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "multi_query_attention": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": 2,
            "pad_token_id": 0,
            "rope_ratio": rope_ratio,
            **numbers,
        },
        "tokenizer_config.json": {"name_or_path": "random-chatglm3", "tokenizer_class": "ChatGLMTokenizer"},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return _write_weights(directory, config, device)


def _write_weights(directory: Path, config: ChatGLMConfig, device: torch.device) -> int:
    places = tensor_places(random_model(config, dtype=torch.bfloat16, device=device))
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in places.items():
        if filled + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in shard.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    size = sum(tensor.numel() * torch.bfloat16.itemsize for tensor in places.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return size


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tiny", is_flag=True, help="a model that a CPU runs at once, with the same vocabulary")
@click.option("--layers", type=click.IntRange(1), help="another number of layers than the shape's own")
@click.option("--device", default=None, help="where weights are drawn; default: the GPU if there is one")
def main(directory: Path, layers: int | None, device: str | None, *, tiny: bool) -> None:
    """Write a checkpoint and print its size."""
    config = TINY if tiny else CHATGLM3_6B
    if layers is not None:
        config = replace(config, num_layers=layers)
    began = time.perf_counter()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = write_checkpoint(directory, config, where)
    click.echo(f"{directory}: {size / 1e9:.2f} GB of weights in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
