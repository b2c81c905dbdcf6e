"""What the Triton image starts: writes the models' repository entries, then becomes tritonserver.

    start_triton.py --model [NAME=]DIR [--device cuda:0] [--dtype auto] -- [ARGUMENTS OF tritonserver]

The entries, one a model, are written anew at each start: the checkpoint's directory is all that a deployment
keeps. The server is private to the gateways: it has no HTTP server, and its gRPC server demands a key for
everything but health, metadata, configurations and inference. Every flag may also come from the environment,
as TRITONGATE_ENGINE_ and its name.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from triton_models.embedded.errors import SetupError
from triton_models.embedded.models import NO_CONTEXT, private_arguments, write_models
from triton_models.tracing import trace_arguments
from wire.flags import model_flags

_SERVER = "tritonserver"
_PREFIX = "tritongate-repository-"


@click.command(context_settings={"max_content_width": 110, "auto_envvar_prefix": "TRITONGATE_ENGINE"})
@click.option("--model", multiple=True, required=True, metavar="[NAME=]DIR", help="Repeatable.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N")
@click.option(
    "--repository-key",
    envvar="TRITONGATE_REPOSITORY_KEY",
    required=True,
    metavar="KEY=VALUE",
    help="What Triton demands for the repository and more; the gateways' setting of that name.",
)
@model_flags()
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(  # noqa: D103 - the module's docstring is its help
    *,
    model: tuple[str, ...],
    device: str,
    repository_key: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    repository = _new_repository()
    try:
        served = write_models(repository, model, device=device, options=options)
    except SetupError as error:
        raise click.ClickException(str(error)) from None
    own = [
        f"--model-repository={repository}",
        f"--model-load-thread-count={len(served) + 1}",  # all of them side by side
        *NO_CONTEXT,
        *private_arguments(repository_key),
        *trace_arguments(options["trace_endpoint"]),
    ]
    os.execvp(_SERVER, [_SERVER, *own, *arguments])  # noqa: S606 - what we are for


def _new_repository() -> Path:
    """Make a folder for this server, and remove those of servers that have ended, which cannot do it.

    Each is locked by a descriptor that its server inherits, so the kernel tells whether that has ended.
    """
    for left in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with suppress(OSError):  # it is in use, or another user's
            descriptor = os.open(left, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(descriptor)
    while True:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX))
        descriptor = os.open(made, os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if made.exists():  # else another start took it for one that was left, before it was locked
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
            return made
        os.close(descriptor)


if __name__ == "__main__":
    main()
