"""`tritongate build`: hands over to the models' side, which declares its options."""

import importlib.util
import os
import sys

import click

_MODULE = "triton_models.build"


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Write a repository and Dockerfile for a stock Triton.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def build(arguments: tuple[str, ...]) -> None:
    """Write a model repository that needs nothing but a stock Triton, and a Dockerfile for it."""
    if importlib.util.find_spec(_MODULE.partition(".")[0]) is None:
        raise click.ClickException(
            "this is the gateway alone; `build` needs the extra `engine`: in the clone, "
            "pip install '.[engine]'"
        )
    words = ["--help" if each == "-h" else each for each in arguments]  # as of the other commands
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *words])  # noqa: S606 - no shell is wanted
