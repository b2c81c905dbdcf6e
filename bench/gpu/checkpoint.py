"""Writes a checkpoint directory in the layout of ChatGLM3-6B, with random weights, to measure its speed."""

import json
import time
from dataclasses import replace
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from bench.engine import random_model
from bench.gpu.tokenizer import tokenizer_model
from triton_models.directory import TOKENIZER_FILE
from triton_models.engine.models.decoder import DecoderConfig
from triton_models.engine.models.positions import Rope
from triton_models.families import tensor_places
from triton_models.text.tokenizers import SPECIAL_TOKENS

_SPECIAL = len(SPECIAL_TOKENS["chatglm3"])
"""Number of special ids, which follow the pieces."""

CHATGLM3_6B = DecoderConfig(
    layers=28,
    hidden=4096,
    feed_forward=13696,
    query_heads=32,
    kv_heads=2,
    head_dim=128,
    vocabulary=65_024,
    positions=8192,
    epsilon=1e-5,
    rope=Rope(share=0.5, base=10_000.0),
    qkv_bias=True,
)

GLM4_9B = replace(CHATGLM3_6B, layers=40, vocabulary=151_552, rope=Rope(share=0.5, base=10_000.0 * 500))
"""Its original form, `glm-4-9b`."""

SHAPES = {"6b": CHATGLM3_6B, "9b": GLM4_9B}
"""By the names that commands give them."""

TINY = replace(
    CHATGLM3_6B,
    layers=2,
    hidden=64,
    feed_forward=128,
    query_heads=4,
    head_dim=16,
)
"""The same vocabulary and context, but almost no arithmetic."""

_SHARD_BYTES = 2 * 2**30
_ROPE_BASE = 10_000.0


def write_checkpoint(directory: Path, config: DecoderConfig, device: torch.device) -> int:
    """Write a checkpoint in bfloat16 with weights drawn on `device`; return the weights' size in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    # ChatGLM3's own tokenizer has 64,789 pieces; about 230 further ids pad the vocabulary and are never
    # sampled. With random weights every id is sampled, and one without text would merge two chunks of a
    # stream. So here nearly all ids have text.
    (directory / TOKENIZER_FILE).write_bytes(tokenizer_model(config.vocabulary - _SPECIAL))
    documents = {
        "config.json": {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "multi_query_attention": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": 2,
            "pad_token_id": 0,
            "num_layers": config.layers,
            "hidden_size": config.hidden,
            "ffn_hidden_size": config.feed_forward,
            "num_attention_heads": config.query_heads,
            "multi_query_group_num": config.kv_heads,
            "kv_channels": config.head_dim,
            "padded_vocab_size": config.vocabulary,
            "seq_length": config.positions,
            "layernorm_epsilon": config.epsilon,
            "add_qkv_bias": config.qkv_bias,
            "rope_ratio": (config.rope.base if config.rope else _ROPE_BASE) / _ROPE_BASE,
        },
        "tokenizer_config.json": {"name_or_path": "random-chatglm3", "tokenizer_class": "ChatGLMTokenizer"},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return _write_weights(directory, config, device)


def _write_weights(directory: Path, config: DecoderConfig, device: torch.device) -> int:
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
        config = replace(config, layers=layers)
    began = time.perf_counter()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = write_checkpoint(directory, config, where)
    click.echo(f"{directory}: {size / 1e9:.2f} GB of weights in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
