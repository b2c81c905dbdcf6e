"""The command `tritongate`.

Each command imports what it needs when it is called: all of it takes a second of CPU, which `chat` and `size`
should not wait for.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click
from pydantic import SecretStr

from gateway import version
from gateway.commands import INTERRUPTED, stop_at_once
from gateway.errors import ListenError
from gateway.settings import (
    CONFIG_VARIABLE,
    ConfigurationError,
    Settings,
    load_settings,
    settings_table,
    unknown_variables,
)
from gateway.settings.guards import faults_of
from gateway.settings.models import ModelSettings
from gateway.settings.values import Scope
from gateway.up import METRICS_PORT, plan_replicas, run_up
from wire.flags import model_flags

if TYPE_CHECKING:
    from gateway.process.listeners import Listeners
    from wire.events import Ready

F = TypeVar("F", bound=Callable[..., Any])


_ELSEWHERE = {
    "batch": "batch",
    "bench": "bench",
    "bench-kserve": "clients",
    "build": "build",
    "chat": "chat",
    "deploy": "deploy",
    "load": "clients",
    "size": "size",
    "unload": "clients",
}
"""In which module of `gateway.commands` each command is."""
UP_DRAIN_S = 5.0
_UP_KEY_NAME = "api-key"
"""What logs and metrics call the key of `up --api-key`."""
UP_PORTS = {"kserve_http_port": 8000, "kserve_grpc_port": 8001}
_UP_DEFAULTS = {
    "log_level": "warning, or info with --log-format",
    "log_format": "plain, or json with --log-level",
    "drain_s": f"{UP_DRAIN_S:g}, which is the most",
}
"""What `up --help` says of settings that `up` has other defaults of."""
_NOT_OF_UP = frozenset({"format", "memory_share", "max_waiting", "heartbeat_s", "trace_endpoint"})
"""Options of an engine that `up` chooses itself, or has as a setting of the gateway."""


class _CannotListen(click.ClickException):
    """The message of `ListenError`, and the flag that chooses another port."""

    def __init__(self, error: ListenError, settings: Settings) -> None:
        flags = {
            settings.port: "--port",
            settings.kserve_http_port: "--kserve-http-port",
            settings.kserve_grpc_port: "--kserve-grpc-port",
        }
        flag = flags.get(error.port) if error.port else None
        super().__init__(f"{error}; {flag} chooses another port" if flag else str(error))


class _Misconfigured(click.ClickException):
    """Reported like a wrong flag: a message and status 2, no traceback."""

    exit_code = 2


def settings_options(
    *, without: frozenset[str] = frozenset(), defaults: Mapping[str, str] = MappingProxyType({})
) -> Callable[[F], F]:
    """Add `--config` and a flag for every setting but those in `without`.

    `defaults` are the command's own, in words, by the names of settings. Flags are plain text here:
    `gateway.settings` alone knows types and bounds.
    """

    def decorate(command: F) -> F:
        for row in reversed(list(settings_table())):
            if row.flag is None or row.name in without:
                continue
            shown = defaults.get(row.name, row.default)
            default = f"default: {shown}; " if shown else ""
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


_timeout = click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="seconds for each of looking up, connecting and probing",
)


def _no_api_key(_context: click.Context, _parameter: click.Parameter, key: str | None) -> None:
    if key is not None:
        raise click.UsageError("`serve` has no --api-key: use --keys-file or TRITONGATE_API_KEYS")


class _Commands(click.Group):
    """Has the commands of `_ELSEWHERE`, too, which are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"gateway.commands.{_ELSEWHERE[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # of which click would make 1, as of any failure
            click.echo(err=True)  # behind the terminal's ^C
            ctx.exit(INTERRUPTED)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(version(), prog_name="tritongate", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """OpenAI-compatible gateway for language models on NVIDIA Triton."""
    # The command is imported and has ends of its own. Those that serve import more, and see to it themselves.
    serves = context.invoked_subcommand in {"up", "serve"}
    if not serves and signal.getsignal(signal.SIGINT) is stop_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if context.invoked_subcommand in {"check", "models", "prompt"}:
        # They say themselves what they find: without a handler, Python prints bare warnings.
        logging.getLogger("gateway").addHandler(logging.NullHandler())


@main.command(short_help="Start Triton and the gateway on this machine.")
@click.option(
    "--model",
    multiple=True,
    metavar="[NAME=]DIR",
    help="checkpoint directory to serve, as NAME or its folder's name; repeatable; none: the built-in model",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=METRICS_PORT,
    show_default=True,
    help="for the metrics of Triton and the engines; 0 takes a free one; replicas have those that follow",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda:N[,cuda:N...]",
    help="where the models run; of several, each has a Triton of its own",
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    help="Tritons, each with all models, behind one gateway  [default: one a device]",
)
@model_flags(without=_NOT_OF_UP)
@click.option(
    "--api-key",
    metavar="KEY",
    help="the one key of clients, with all scopes; other users of this machine can read it on the command "
    "line, but not in the variable TRITONGATE_API_KEYS or a --keys-file",
)
@settings_options(
    without=frozenset({"upstreams", "resolve_interval_s", "models", "warn_of_faults"}), defaults=_UP_DEFAULTS
)
def up(*, config: Path | None, api_key: str | None, **values: Any) -> None:
    """Start a Triton on this machine, or several, and serve its models.

    Ctrl-C gives running requests at most 5 s to finish; a second one ends at once. Triton itself is private:
    its clients reach the gateway, on the ports where Triton used to be.
    """
    from gateway.process.listeners import bind_gateway, claim  # noqa: PLC0415 - as the module says, like those below
    from gateway.process.workers import prepare  # noqa: PLC0415
    from gateway.process.workers import run as run_gateway  # noqa: PLC0415

    flags = {name: value for name, value in values.items() if name in Settings.model_fields}
    options = {name: value for name, value in values.items() if name not in flags}
    if api_key is not None:
        if not api_key:
            raise _Misconfigured("--api-key: the key is empty")
        flags["api_keys"] = [{"name": _UP_KEY_NAME, "key": api_key, "scopes": [*Scope]}]
    settings = _load(config, flags)
    chosen = {"log_level", "log_format"} & settings.model_fields_set
    limited = "max_in_flight" in settings.model_fields_set
    quiet = {} if chosen else {"log_level": "warning", "log_format": "plain"}
    named = settings.ports()  # --port 8000 serves Triton's clients, too
    ports = {
        name: port
        for name, port in UP_PORTS.items()
        if name not in settings.model_fields_set and port not in named
    }
    settings = settings.model_copy(update={"drain_s": min(settings.drain_s, UP_DRAIN_S), **quiet, **ports})
    device, count, models = options.pop("device"), options.pop("replicas"), options.pop("model")
    try:
        replicas = plan_replicas(
            device,
            count,
            models=models,
            load_at_start=settings.max_loaded_models,
            **options,
            trace_endpoint=settings.trace_endpoint,
        )
    except ValueError as error:
        raise _Misconfigured(str(error)) from None
    first = options["metrics_port"]
    if both := {*settings.ports()} & {*range(first, first + len(replicas))}:
        raise _Misconfigured(
            f"port {min(both)} is the gateway's and that of Triton's metrics; --metrics-port chooses another"
        )
    try:
        # First, so that a taken port is reported before Triton's slow start.
        listeners = bind_gateway(settings)

        def serve_models(addresses: Sequence[str], ready: "Ready", on_stop: Callable[[], None]) -> int:
            models = _served_by_up(settings, ready)
            upstream = {
                "upstreams": tuple(addresses),
                "repository_key": SecretStr(ready.repository_key),
                "models": models,
                "warn_of_faults": False,  # it is private
                **({} if limited else {"max_in_flight": settings.max_in_flight * len(addresses)}),
                **dict.fromkeys(("upstream_ca", "upstream_cert", "upstream_key"), ()),
            }
            serving = settings.model_copy(update=upstream)
            if faults := [*faults_of(serving)]:  # which a worker would find, too, again and again
                raise _Misconfigured("\n".join(faults))
            return run_gateway(
                serving,
                listeners=listeners,
                on_ready=lambda url: click.echo(greeting(url, [*models], listeners[0], settings)),
                on_stop=on_stop,
            )

        with contextlib.ExitStack() as stack:
            for each in listeners:
                stack.callback(each.close)
            for address in filter(None, [*listeners[0].http, listeners[0].reserved]):
                stack.enter_context(claim(address))
            status = run_up(replicas, serve_models, sys.stdout, meanwhile=partial(prepare, listeners))
    except ListenError as error:
        raise _CannotListen(error, settings) from None
    sys.exit(status)


def _served_by_up(settings: Settings, ready: "Ready") -> Mapping[str, ModelSettings]:
    """Return what is set for each public name; one of no model here would never be ready."""
    if settings.models_file is None:
        return {name: ModelSettings(entry=name) for name in ready.models}
    for name, each in settings.models.items():
        if not (each.entry in ready.models or each.upstreams):
            known = ", ".join(ready.models)
            raise _Misconfigured(
                f"models.{name}.entry: {each.entry!r} is not served here; these are: {known}"
            )
    return settings.models


def greeting(url: str, models: Sequence[str], listeners: "Listeners", settings: Settings) -> str:
    """Say in a line each where the gateway and its page are, and a command to copy.

    Where keys are needed, the command reads one from $KEY.
    """
    from gateway.process.listeners import base_url  # noqa: PLC0415

    body = json.dumps(
        {"model": models[0], "messages": [{"role": "user", "content": "你好"}]}, ensure_ascii=False
    )
    key = ' -H "Authorization: Bearer $KEY"' if settings.api_keys else ""
    second = listeners.http[1 : len(listeners.http) - listeners.with_metrics]
    kserve = [f"HTTP {base_url(listener, tls=url.startswith('https:'))}" for listener in second]
    kserve += [f"gRPC {listeners.grpc}"] if listeners.grpc else []
    legacy = f" (for clients of Triton: {', '.join(kserve)})" if kserve else ""
    page = f"Chat page: {url}/\n" if settings.chat_page else ""
    return (
        f"\nServing {', '.join(models)} at {url}/v1{legacy}\n{page}"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n"
    )


@main.command(short_help="Start the gateway alone, before running Tritons.")
@click.option("--api-key", hidden=True, expose_value=False, callback=_no_api_key)
@settings_options()
def serve(config: Path | None, **flags: Any) -> None:
    """Serve the models of one or many running Tritons.

    A flag overrides an environment variable, which overrides the YAML file. SIGUSR2 starts the same command
    again in the place of this one, which ends once its connections are closed.
    """
    from gateway.process.handover import Inherited  # noqa: PLC0415
    from gateway.process.workers import run as run_gateway  # noqa: PLC0415

    settings = _load(config, flags)
    try:
        inherited = Inherited.from_environment()
        status = run_gateway(settings, inherited=inherited, on_ready=lambda _url: inherited.tell_ready())
        if not status:
            inherited.outlast(settings.drain_s)
    except ListenError as error:
        raise _CannotListen(error, settings) from None
    sys.exit(status)


@main.command(short_help="Say what is wrong with settings, Tritons and models.")
@settings_options()
@_timeout
def check(config: Path | None, timeout_s: float, **flags: Any) -> None:
    """Check the configuration, connect to every upstream and report; status 1 unless all is well."""
    from gateway.commands.check import check as check_upstreams  # noqa: PLC0415

    settings = _load(config, flags)
    click.echo("configuration: ok")
    findings = asyncio.run(check_upstreams(settings, timeout_s=timeout_s))
    for finding in findings:
        click.echo(finding.text)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


@main.command(short_help="List the models that are served.")
@click.argument("at", metavar="[URL]", required=False)
@click.option("--url", metavar="URL", help="of a running gateway, which is asked instead")
@click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key of the gateway at URL")
@settings_options()
@_timeout
def models(
    *, at: str | None, url: str | None, key: str | None, config: Path | None, timeout_s: float, **flags: Any
) -> None:
    """List the models of the configuration, as their Tritons have them; or of the running gateway at URL."""
    from gateway.commands.models import models_at, models_of, table  # noqa: PLC0415

    url = url or at
    if url is None:
        rows = asyncio.run(models_of(_load(config, flags), timeout_s=timeout_s))
    else:
        rows = models_at(url, key)
    click.echo(table(rows))


@main.command(short_help="Show the text and token ids a model is given.")
@click.argument("messages", type=click.File("rb"), default="-")
@click.option("--model", required=True, help="public name, or an alias")
@settings_options()
@_timeout
def prompt(*, messages: BinaryIO, model: str, config: Path | None, timeout_s: float, **flags: Any) -> None:
    """Show what a model is given to read, and the ids of its tokens.

    MESSAGES is a file of JSON, or - for standard input: a list of messages, or a request with messages, and
    perhaps tools.
    """
    from gateway.commands.models import print_prompt  # noqa: PLC0415

    print_prompt(_load(config, flags), model, messages.read(), timeout_s)


def _load(config: Path | None, flags: dict[str, Any]) -> Settings:
    for name in unknown_variables():
        click.echo(f"Warning: the environment variable {name} sets nothing; it is ignored", err=True)
    try:
        given = {
            name: ",".join(value) if isinstance(value, tuple) else value
            for name, value in flags.items()
            if value not in (None, ())
        }
        return load_settings(given, config)
    except ConfigurationError as error:
        raise _Misconfigured(str(error)) from None
