"""Compares our own forward pass with transformers' in our engine, on one checkpoint with random weights.

python -m bench.transformers_engine [--rounds 5]
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.engine import EngineRow, measure
from bench.rows import table
from triton_models.checkpoint import load_model
from triton_models.engine.models import CausalModel
from triton_models.transformers_checkpoint import load_transformers

_CPU = torch.device("cpu")


def write_llama(directory: Path) -> None:
    """Write a checkpoint of about 100 million parameters, of which only the speed is meaningful."""
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)


def both(directory: Path) -> Iterator[tuple[str, CausalModel]]:
    """Yield the checkpoint's models by name, each twice, so that a change of the machine's load shows."""
    for name in ("own", "transformers", "own again", "transformers again"):
        if name.startswith("own"):
            yield name, load_model(directory, torch.float32, _CPU)
        else:
            yield name, load_transformers(directory, torch.float32, _CPU)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="of which the median counts")
def main(rounds: int) -> None:
    """Print milliseconds a decode step."""
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder))
        rows = measure(both(Path(folder)), (1, 8), prompt=64, new_tokens=32, rounds=rounds)
        click.echo(table(EngineRow, rows))


if __name__ == "__main__":
    main()
