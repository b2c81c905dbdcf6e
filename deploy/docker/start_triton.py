"""What the Triton image starts: writes the models' repository entries, then becomes tritonserver.

    start_triton.py --model [NAME=]DIR [--device cuda:0] [--dtype auto] -- [ARGUMENTS OF tritonserver]

The entries are written anew at each start: the checkpoint's directory is all that a deployment keeps.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from triton_models.embedded.errors import OptionsError
from triton_models.embedded.models import model_flags, write_models
from triton_models.tracing import trace_arguments

_SERVER = "tritonserver"


@click.command(context_settings={"max_content_width": 110})
@click.option("--model", "models", multiple=True, required=True, metavar="[NAME=]DIR", help="Repeatable.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N")
@model_flags
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(  # noqa: D103 - the module's docstring is its help
    *,
    models: tuple[str, ...],
    device: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    repository = Path(tempfile.mkdtemp(prefix="repository-"))
    try:
        served = write_models(repository, models, device=device, options=flags)
    except OptionsError as error:
        raise click.ClickException(str(error)) from None
    own = [*server_arguments(repository, served), *trace_arguments(flags["trace_endpoint"])]
    os.execvp(_SERVER, [_SERVER, *own, *arguments])  # noqa: S606 - what we are for


def server_arguments(repository: Path, served: list[str]) -> list[str]:
    """Return what tritonserver needs to know of the entries: where they are; to load them side by side."""
    return [f"--model-repository={repository}", f"--model-load-thread-count={len(served) + 1}"]


if __name__ == "__main__":
    main()
