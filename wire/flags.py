"""Command-line flags for the options of an engine."""

from collections.abc import Callable
from typing import Any

import click

from wire.options import OPTIONS, Option, Value


def model_flags(*, without: frozenset[str] = frozenset()) -> Callable[[Callable[..., Any]], Any]:
    """Add a flag for each option but those in `without`, whose values are None where they are not set."""

    def decorate(command: Callable[..., Any]) -> Any:
        for option in reversed(OPTIONS):
            if option.name not in without:
                command = _flag(option)(command)
        return command

    return decorate


def _flag(option: Option) -> Callable[..., Any]:
    def parse(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Value | None:
        try:
            return None if text is None else option.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    metavar = "|".join(option.choices) or {int: "N", float: "X", str: "TEXT"}[option.kind]
    text = f"{option.help} [default: {option.default_text}]"
    return click.option(option.flag, option.name, callback=parse, metavar=metavar, help=text)
