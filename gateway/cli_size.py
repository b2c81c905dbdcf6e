"""The command `tritongate size`."""

import sys
from pathlib import Path

import click

from gateway.sizing import (
    BLOCK_TOKENS,
    GIB,
    ITEM_BYTES,
    MAX_RUNNING,
    Shape,
    Sizing,
    SizingError,
    read_shape,
)
from gateway.sizing import size as size_up

_CONTEXTS = (1024, 2048, 4096, 8192, 32768, 131072)


@click.command()
@click.option(
    "--model",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="checkpoint directory; its config.json is enough",
)
@click.option(
    "--gpu-memory",
    type=click.FloatRange(0, min_open=True),
    required=True,
    metavar="GIB",
    help="memory of one GPU in GiB, as nvidia-smi shows it",
)
@click.option("--dtype", type=click.Choice(list(ITEM_BYTES)), default="bfloat16", show_default=True)
@click.option("--max-running", type=click.IntRange(1), default=MAX_RUNNING, show_default=True)
def size(directory: Path, gpu_memory: float, dtype: str, max_running: int) -> None:
    """Estimate how much of a GPU a checkpoint takes and how many sequences fit; status 1 if none does."""
    try:
        shape = read_shape(directory)
    except SizingError as error:
        raise click.ClickException(str(error)) from None
    sizing = size_up(
        shape, gpu_bytes=int(gpu_memory * GIB), item_bytes=ITEM_BYTES[dtype], max_running=max_running
    )
    click.echo(f"weights   {sizing.weights / GIB:8.2f} GiB  {dtype}")
    click.echo(f"steps     {sizing.steps / GIB:8.2f} GiB  estimated, for {max_running} sequences at once")
    click.echo(
        f"KV cache  {sizing.kv_cache / GIB:8.2f} GiB  {sizing.blocks:,} blocks of {BLOCK_TOKENS} tokens, "
        f"{sizing.kv_token:,} bytes a token"
    )
    if not sizing.blocks:
        click.echo(f"It does not fit a GPU of {gpu_memory:g} GiB.")
        sys.exit(1)
    for tokens in _contexts(shape, sizing):
        click.echo(f"{tokens:>9,} tokens each: {sizing.sequences(tokens, max_running):,} sequences at once")


def _contexts(shape: Shape, sizing: Sizing) -> list[int]:
    """Return the lengths to show; the longest is what both the model and the cache allow."""
    longest = min(shape.context, sizing.blocks * BLOCK_TOKENS)
    return [*(tokens for tokens in _CONTEXTS if tokens < longest), longest]
