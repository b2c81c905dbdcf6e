"""The command `tritongate`."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.check import check as check_upstreams
from gateway.server import ListenError, listen
from gateway.server import run as run_server
from gateway.settings import CONFIG_VARIABLE, ConfigurationError, Settings, load_settings, settings_table
from gateway.version import version

F = TypeVar("F", bound=Callable[..., Any])


class _Misconfigured(click.ClickException):
    """Told like a wrong flag: message, status 2, no traceback."""

    exit_code = 2


def settings_options(*, without: frozenset[str] = frozenset()) -> Callable[[F], F]:
    """Add `--config` and a flag for every setting but those in `without`.

    Flags are text here: one place, `gateway.settings`, knows types and bounds for every source.
    """

    def decorate(command: F) -> F:
        for row in reversed(list(settings_table())):
            if row.flag is None or row.name in without:
                continue
            default = f"default: {row.default}; " if row.default else ""
            text = f"{row.help}  [{default}env: {row.env}]"
            if row.default in ("true", "false"):
                declaration = f"{row.flag}/--no-{row.flag.removeprefix('--')}"
                command = click.option(declaration, row.name, default=None, help=text)(command)
            else:
                command = click.option(row.flag, row.name, metavar="VALUE", help=text)(command)
        return click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            help=f"YAML file with settings  [env: {CONFIG_VARIABLE}]",
        )(command)

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version(), prog_name="tritongate", message="%(prog)s %(version)s")
def main() -> None:
    """OpenAI-compatible gateway for ChatGLM on NVIDIA Triton."""


@main.command()
@settings_options()
def serve(config: Path | None, **flags: Any) -> None:
    """Serve the models of one or many running Tritons.

    A setting comes from its flag, else its environment variable, else the YAML file.
    """
    settings = _load(config, flags)
    try:
        listener = listen(settings.host, settings.port)
    except ListenError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(run_server(settings, listener=listener))


@main.command()
@settings_options()
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="how long to look",
)
def check(config: Path | None, timeout_s: float, **flags: Any) -> None:
    """Read the configuration, connect to every upstream, say what is there; status 1 unless all is well."""
    settings = _load(config, flags)
    click.echo("configuration: ok")
    findings = asyncio.run(check_upstreams(settings, timeout_s=timeout_s))
    for finding in findings:
        click.echo(finding.text)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


def _load(config: Path | None, flags: dict[str, Any]) -> Settings:
    try:
        return load_settings({name: value for name, value in flags.items() if value is not None}, config)
    except ConfigurationError as error:
        raise _Misconfigured(str(error)) from None
