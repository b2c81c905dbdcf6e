"""The served models: their command-line flags, and the repository entries written or found for them.

A program with these flags must be able to report that parts of the engine are not installed: so what writes
entries is imported only when it is needed.
"""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from triton_models.embedded.errors import OptionsError
from triton_models.options import OPTIONS, Option, Options, Value

BUILT_IN_NAME = "chatglm3-demo"
BUILT_IN_CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / BUILT_IN_NAME
BUILT_IN_NOTICE = (
    f"{BUILT_IN_NAME} is a demonstration that knows a few pages by heart. "
    "Serve a model of yours with --model DIR"
)

F = TypeVar("F", bound=Callable[..., Any])


def model_flags(command: F) -> F:
    """Add a flag for each option to `command`, whose values are None where they are not set."""
    return reduce(lambda decorated, option: _flag(option)(decorated), reversed(OPTIONS), command)


def _flag(option: Option) -> Callable[[F], F]:
    def parse(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Value | None:
        try:
            return None if text is None else option.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    metavar = "|".join(option.choices) or {int: "N", float: "X", str: "TEXT"}[option.kind]
    text = f"{option.help} [default: {option.default_text}]"
    return click.option(option.flag, option.name, callback=parse, metavar=metavar, help=text)


def read_model_argument(argument: str) -> tuple[str, Path]:
    """Split `[NAME=]DIR`; without a name, the model is named after the folder.

    Raises:
        OptionsError: there is no such directory, or no config.json in it.
    """
    before, equals, after = argument.partition("=")
    if equals and "/" not in before:
        name, path = before, Path(after).expanduser().resolve()
    else:
        path = Path(argument).expanduser().resolve()
        name = path.name
    if not path.is_dir():
        raise OptionsError(f"--model {argument}: {path} is not a directory")
    if not (path / "config.json").is_file():
        raise OptionsError(f"--model {argument}: {path} has no config.json, so it is no checkpoint")
    return name, path


def write_models(repository: Path, arguments: tuple[str, ...], *, device: str, options: Options) -> list[str]:
    """Write the entries of the models in `arguments`, or of the built-in model if there are none.

    Returns the models' names, which are also their entries'. All models have the same device (`cpu` or
    `cuda:N`) and the same options; of these, those that are None are the engine's to choose.

    Raises:
        OptionsError: an argument is not a checkpoint, or a name is invalid or occurs twice.
    """
    from triton_models.entries import ModelEntry, write_entry  # noqa: PLC0415 - see the module's docstring

    chosen = {name: value for name, value in options.items() if value is not None}
    models = [read_model_argument(argument) for argument in arguments]
    written: list[str] = []
    for name, path in models or [(BUILT_IN_NAME, BUILT_IN_CHECKPOINT)]:
        if name in written:
            raise OptionsError(f"two models are named {name!r}: write --model NAME=DIR to rename one")
        try:
            entry = ModelEntry(name=name, checkpoint=str(path), device=device, options=chosen)
        except ValueError as error:
            raise OptionsError(f"--model {path}: {error}") from error
        write_entry(repository, model=entry)
        written.append(name)
    return written


def find_models(repository: Path) -> list[str]:
    """Return the names of the entries in an existing repository.

    Raises:
        OptionsError: it holds none.
    """
    found = sorted(config.parent.name for config in repository.glob("*/config.pbtxt"))
    if not found:
        raise OptionsError(f"{repository} holds no model: no folder with a config.pbtxt")
    return found
