"""What the Triton image starts: writes the models' repository entries, then becomes tritonserver.

    start_triton.py --model [NAME=]DIR [--device cuda:0] [--dtype auto] -- [ARGUMENTS OF tritonserver]

The entries are written anew at each start: the checkpoint's directory is all that a deployment keeps.
"""

import os
import tempfile
from pathlib import Path

import click

from triton_models.embedded.errors import OptionsError
from triton_models.embedded.models import ModelOptions, Served, write_models
from triton_models.tracing import trace_arguments

_SERVER = "tritonserver"


@click.command(context_settings={"max_content_width": 110})
@click.option("--model", "models", multiple=True, required=True, metavar="[NAME=]DIR", help="Repeatable.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--max-context", type=click.IntRange(min=2), help="Tokens of prompt and answer together.")
@click.option("--max-running", type=click.IntRange(min=1), help="Sequences in one step of an engine.")
@click.option("--max-batched-tokens", type=click.IntRange(min=1), help="Tokens in one step of an engine.")
@click.option("--kv-memory-gib", type=click.FloatRange(min=0, min_open=True), help="Memory for the KV cache.")
@click.option("--trace-endpoint", metavar="URL", help="Where spans go by OTLP/HTTP.")
@click.option("--contract", "contracts", multiple=True, metavar="[NAME=]CONTRACT", help="Repeatable.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(  # noqa: D103 - the module's docstring is its help
    *,
    models: tuple[str, ...],
    device: str,
    dtype: str,
    max_context: int | None,
    max_running: int | None,
    max_batched_tokens: int | None,
    kv_memory_gib: float | None,
    trace_endpoint: str | None,
    contracts: tuple[str, ...],
    arguments: tuple[str, ...],
) -> None:
    options = ModelOptions(
        device=device,
        dtype=None if dtype == "auto" else dtype,
        max_context=max_context,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        kv_memory_gib=kv_memory_gib,
        trace_endpoint=trace_endpoint,
        contracts=contracts,
    )
    repository = Path(tempfile.mkdtemp(prefix="repository-"))
    try:
        served = write_models(repository, models, options)
    except OptionsError as error:
        raise click.ClickException(str(error)) from None
    own = [*server_arguments(repository, served), *trace_arguments(trace_endpoint)]
    os.execvp(_SERVER, [_SERVER, *own, *arguments])  # noqa: S606 - what we are for


def server_arguments(repository: Path, served: list[Served]) -> list[str]:
    """Return what tritonserver needs to know of the entries: where they are; to load them side by side."""
    entries = sum(len(model.entries) for model in served)
    return [f"--model-repository={repository}", f"--model-load-thread-count={entries + 1}"]


if __name__ == "__main__":
    main()
