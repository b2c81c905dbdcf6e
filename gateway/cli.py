"""The command `tritongate`."""

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import SecretStr

from gateway.check import check as check_upstreams
from gateway.cli_clients import bench, load, unload
from gateway.cli_size import size
from gateway.configuration import (
    CONFIG_VARIABLE,
    ConfigurationError,
    load_settings,
    settings_table,
    unknown_variables,
)
from gateway.listeners import ListenError, Listeners, base_url, bind_gateway
from gateway.settings import Settings
from gateway.up import TritonOptions, run_up
from gateway.version import version
from gateway.workers import run as run_gateway
from wire.events import Ready

F = TypeVar("F", bound=Callable[..., Any])


_UP_DRAIN_S = 5.0
_UP_PORTS = {"kserve_http_port": 8000, "kserve_grpc_port": 8001}
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LATER_DTYPES = ("int8", "int4")


class _Misconfigured(click.ClickException):
    """Reported like a wrong flag: a message and status 2, no traceback."""

    exit_code = 2


def settings_options(*, without: frozenset[str] = frozenset()) -> Callable[[F], F]:
    """Add `--config` and a flag for every setting but those in `without`.

    Flags are plain text here: `gateway.configuration` alone knows the types and bounds, for every source.
    """

    def decorate(command: F) -> F:
        for row in reversed(list(settings_table())):
            if row.flag is None or row.name in without:
                continue
            default = f"default: {row.default}; " if row.default else ""
            text = f"{row.help}  [{default}env: {row.env}]"
            if row.many:
                command = click.option(row.flag, row.name, multiple=True, metavar="VALUE", help=text)(command)
            elif row.default in ("true", "false"):
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


for _command in (load, unload, bench, size):
    main.add_command(_command)


@main.command()
@click.option(
    "--model",
    "checkpoints",
    multiple=True,
    metavar="[NAME=]DIR",
    help="checkpoint directory to serve, as NAME or its folder's name; repeatable; none: the built-in model",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=8002,
    show_default=True,
    help="for the metrics of Triton and the engines; 0 takes a free one",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda:N")
@click.option("--dtype", type=click.Choice(_DTYPES + _LATER_DTYPES), default="auto", show_default=True)
@click.option("--max-context", type=click.IntRange(2), help="tokens of prompt and answer together")
@click.option("--max-running", type=click.IntRange(1), help="sequences in one step of an engine")
@click.option("--max-batched-tokens", type=click.IntRange(1), help="tokens in one step of an engine")
@click.option(
    "--burst-tokens", type=click.IntRange(1), help="tokens in one step while enough prompts wait to fill it"
)
@click.option(
    "--burst-steps",
    type=click.IntRange(0),
    help="consecutive steps in which a burst of prompts may run without decodes",
)
@click.option(
    "--kv-memory-gib", type=click.FloatRange(0, min_open=True), help="memory of an engine's KV cache"
)
@settings_options(without=frozenset({"upstreams", "resolve_interval_s", "models"}))
def up(
    *,
    config: Path | None,
    checkpoints: tuple[str, ...],
    metrics_port: int,
    device: str,
    dtype: str,
    max_context: int | None,
    max_running: int | None,
    max_batched_tokens: int | None,
    burst_tokens: int | None,
    burst_steps: int | None,
    kv_memory_gib: float | None,
    **flags: Any,
) -> None:
    """Start a Triton on this machine and serve its models.

    Ctrl-C gives running requests at most 5 s to finish; a second one ends at once. Triton itself is private:
    its clients reach the gateway, on the ports where Triton used to be.
    """
    if dtype in _LATER_DTYPES:
        raise click.UsageError(f"--dtype {dtype} is not supported yet; choose one of {', '.join(_DTYPES)}")
    settings = _load(config, flags)
    quiet = {} if "log_level" in settings.model_fields_set else {"log_level": "warning"}
    ports = {name: port for name, port in _UP_PORTS.items() if name not in settings.model_fields_set}
    settings = settings.model_copy(update={"drain_s": min(settings.drain_s, _UP_DRAIN_S), **quiet, **ports})
    options = TritonOptions(
        models=checkpoints,
        metrics_port=metrics_port,
        device=device,
        dtype=dtype,
        max_context=max_context,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        burst_tokens=burst_tokens,
        burst_steps=burst_steps,
        kv_memory_gib=kv_memory_gib,
        trace_endpoint=settings.trace_endpoint,
    )
    try:
        # First, so that a taken port is reported before Triton's slow start.
        listeners = bind_gateway(
            settings.host,
            settings.http_ports(),
            grpc_port=settings.kserve_grpc_port,
            count=settings.workers,
        )

        def serve_models(ready: Ready) -> int:
            upstream = {
                "upstreams": (ready.grpc,),
                "repository_key": SecretStr(ready.repository_key),
                "models": tuple(ready.models),
            }
            return run_gateway(
                settings.model_copy(update=upstream),
                listeners=listeners,
                on_ready=lambda url: click.echo(
                    greeting(url, ready.models, listeners[0], keyed=bool(settings.api_keys))
                ),
            )

        with contextlib.ExitStack() as stack:
            for each in listeners:
                stack.callback(each.close)
            status = run_up(options, serve_models, sys.stdout)
    except ListenError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(status)


def greeting(url: str, models: Sequence[str], listeners: Listeners, *, keyed: bool) -> str:
    """Say where the gateway is, with a command to copy; where keys are needed it reads one from $KEY."""
    body = json.dumps(
        {"model": models[0], "messages": [{"role": "user", "content": "你好"}]}, ensure_ascii=False
    )
    key = ' -H "Authorization: Bearer $KEY"' if keyed else ""
    kserve = [f"HTTP {base_url(listener)}" for listener in listeners.http[1:]]
    kserve += [f"gRPC {listeners.grpc}"] if listeners.grpc else []
    legacy = f"For clients of Triton: {', '.join(kserve)}\n" if kserve else ""
    return (
        f"\nServing {', '.join(models)} at {url}/v1\n{legacy}\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n"
    )


@main.command()
@settings_options()
def serve(config: Path | None, **flags: Any) -> None:
    """Serve the models of one or many running Tritons.

    A flag overrides an environment variable, which overrides the YAML file.
    """
    settings = _load(config, flags)
    try:
        status = run_gateway(settings)
    except ListenError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(status)


@main.command()
@settings_options()
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="seconds for each of looking up, connecting and probing",
)
def check(config: Path | None, timeout_s: float, **flags: Any) -> None:
    """Check the configuration, connect to every upstream and report; status 1 unless all is well."""
    settings = _load(config, flags)
    click.echo("configuration: ok")
    findings = asyncio.run(check_upstreams(settings, timeout_s=timeout_s))
    for finding in findings:
        click.echo(finding.text)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


def _load(config: Path | None, flags: dict[str, Any]) -> Settings:
    for name in unknown_variables():
        click.echo(f"Warning: the environment variable {name} is not a setting; it is ignored", err=True)
    try:
        given = {
            name: ",".join(value) if isinstance(value, tuple) else value
            for name, value in flags.items()
            if value not in (None, ())
        }
        return load_settings(given, config)
    except ConfigurationError as error:
        raise _Misconfigured(str(error)) from None
