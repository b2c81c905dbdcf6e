"""The command-line flags for served models, shared by all programs that start a tritonserver.

Imports no part of the engine: a program with these flags must be able to report that it is not installed.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _none_if_auto(_context: click.Context, _parameter: click.Parameter, value: str) -> str | None:
    return None if value == "auto" else value


_FLAGS = (
    click.option("--dtype", default="auto", show_default=True, callback=_none_if_auto),
    click.option("--max-context", type=click.IntRange(min=2), help="Tokens of prompt and answer together."),
    click.option("--max-running", type=click.IntRange(min=1), help="Sequences in one step of an engine."),
    click.option("--max-batched-tokens", type=click.IntRange(min=1), help="Tokens in one step of an engine."),
    click.option("--burst-tokens", type=click.IntRange(min=1), help="Tokens in one step while many wait."),
    click.option(
        "--burst-steps", type=click.IntRange(min=0), help="Steps that leave decodes out for a burst."
    ),
    click.option(
        "--kv-memory-gib", type=click.FloatRange(min=0, min_open=True), help="Memory for the KV cache."
    ),
    click.option("--trace-endpoint", metavar="URL", help="Where spans go by OTLP/HTTP."),
    click.option(
        "--contract",
        "contracts",
        multiple=True,
        metavar="[NAME=]CONTRACT",
        help="What the entry of a model's own name speaks: batched, unbatched or chatglm2; repeatable.",
    ),
)


def model_flags(command: F) -> F:
    """Add the flags to `command`. Their parameter names are those of the fields of `models.ModelOptions`."""
    return reduce(lambda decorated, flag: flag(decorated), reversed(_FLAGS), command)
