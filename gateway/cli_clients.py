"""The commands that are clients of something already running: `load`, `unload` and `bench`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import click

from gateway.remote import DEFAULT_URL, RemoteError, RemoteGateway
from gateway.timing import (
    Client,
    GrpcClient,
    HttpClient,
    Timing,
    TimingError,
    Work,
    measure,
    read_inputs,
)

F = TypeVar("F", bound=Callable[..., Any])

_SHOWN = tuple(field.name for field in fields(Timing) if field.name != "first_failure")


def _gateway_options(command: F) -> F:
    for option in (
        click.option("--upstream", metavar="HOST:PORT", help="on this Triton only"),
        click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key with the scope admin"),
        click.option("--url", default=DEFAULT_URL, show_default=True, help="of the gateway"),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("model")
@click.option("--reload", is_flag=True, help="unload it first if it is loaded")
@_gateway_options
def load(*, model: str, reload: bool, url: str, key: str | None, upstream: str | None) -> None:
    """Have a running gateway load MODEL, and wait until it is ready."""
    _change(url, key, model, "load", {"reload": reload, "upstream": upstream})


@click.command()
@click.argument("model")
@_gateway_options
def unload(*, model: str, url: str, key: str | None, upstream: str | None) -> None:
    """Have a running gateway unload MODEL, and wait until its requests in flight have ended."""
    _change(url, key, model, "unload", {"upstream": upstream})


def _change(url: str, key: str | None, model: str, action: str, options: dict[str, Any]) -> None:
    try:
        answer = RemoteGateway(url, key).change_model(model, action, options)
    except RemoteError as error:
        raise click.ClickException(str(error)) from None
    for change in answer["changes"]:
        entries = ", ".join(change["entries"])
        done = f"{action}ed {entries}" if entries else f"nothing to {action}"
        click.echo(f"{change['upstream']}: {done}")
    state = "ready" if answer["model"]["ready"] else "not ready"
    click.echo(f"{model} is {'unloaded' if answer['model'].get('unloaded') else state}")


@click.command()
@click.option("--model", required=True, help="model to ask")
@click.option("--grpc", "grpc_address", default="127.0.0.1:8001", show_default=True, help="for KServe")
@click.option("--http", "http_url", default="http://127.0.0.1:8000", show_default=True, help="for KServe")
@click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key of the gateway")
@click.option("--protocol", type=click.Choice(["both", "grpc", "http"]), default="both", show_default=True)
@click.option(
    "--concurrency", type=click.IntRange(1, 1024), default=4, show_default=True, help="clients at once"
)
@click.option(
    "--count", type=click.IntRange(1), default=40, show_default=True, help="requests in all, of each protocol"
)
@click.option("--prompt", default="你好", show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.8, show_default=True)
@click.option(
    "--max-token",
    type=click.IntRange(1, 2**15 - 1),
    default=128,
    show_default=True,
    help="limit on prompt and answer together",
)
@click.option(
    "--history-len", type=click.IntRange(0, 2**15 - 1), default=10, show_default=True, help="in rounds"
)
def bench(*, grpc_address: str, http_url: str, protocol: str, **work: Any) -> None:
    """Time a model as clients of Triton ask it, over gRPC and HTTP side by side.

    Each client sends its next request as soon as it has an answer. Status 1 if a request failed.
    """
    asked = Work(**work)
    try:
        inputs = read_inputs(grpc_address, asked)
        connect: dict[str, Callable[[], Client]] = {
            "grpc": lambda: GrpcClient(grpc_address, asked, inputs),
            "http": lambda: HttpClient(http_url, asked, inputs),
        }
        chosen = connect if protocol == "both" else {protocol: connect[protocol]}
        timings = [measure(name, make, asked) for name, make in chosen.items()]
    except TimingError as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{asked.model}: {asked.count} requests by {asked.concurrency} clients, max_token {asked.max_token}, "
        f"temperature {asked.temperature:g}; times in ms"
    )
    click.echo(table(timings))
    for timing in timings:
        if timing.failed:
            click.echo(f"{timing.protocol}: the first of {timing.failed} failures: {timing.first_failure}")
    sys.exit(1 if any(timing.failed for timing in timings) else 0)


def table(timings: Sequence[Timing]) -> str:
    """Format the timings side by side, one row per measure."""
    rows = [[name, *(_show(getattr(timing, name)) for timing in timings)] for name in _SHOWN]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        shown = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"{label.ljust(widths[0])}  {shown}")
    return "\n".join(lines)


def _show(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
