"""`python -m triton_models.embedded`: the embedded Triton as a process; events on stdout, logs on stderr."""

import asyncio
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from triton_models.embedded import models
from triton_models.embedded.errors import EmbeddedError, PlatformError
from triton_models.embedded.installation import Installation, choose_device, find_installation
from triton_models.embedded.models import model_flags
from triton_models.embedded.warden import RunDirectory
from triton_models.tracing import trace_arguments
from wire.events import Event, Failed, Notice, write_event

logger = logging.getLogger(__name__)


@click.command()
@click.option(
    "--model", "names", multiple=True, metavar="[NAME=]DIR", help="A checkpoint to serve; repeatable."
)
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Serve the entries of this model repository instead of --model.",
)
@click.option("--grpc-port", default=0, show_default="any free", type=click.IntRange(0, 65535))
@click.option("--metrics-port", default=0, show_default="any free", type=click.IntRange(0, 65535))
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda:N")
@model_flags
@click.option(
    "--exit-with-stdin", is_flag=True, help="Stop when standard input ends, as it does with the parent."
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
)
def main(*, exit_with_stdin: bool, log_level: str, **arguments: Any) -> None:
    """Serve models on the tritonserver of the nvidia-pytriton wheel, on 127.0.0.1 only."""
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if arguments["names"] and arguments["repository"]:
        raise click.UsageError("--model and --repository exclude each other")
    sys.exit(asyncio.run(_run(arguments, exit_with_stdin=exit_with_stdin)))


async def _run(arguments: Mapping[str, Any], *, exit_with_stdin: bool) -> int:
    """Serve until a signal, the end of standard input or of the parent; return the exit status."""
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None  # noqa: S101 - this is a coroutine

    def stop() -> None:
        if not serving.cancelling():  # a second request would interrupt the clean-up
            serving.cancel()

    def emit(event: Event) -> None:
        try:
            write_event(sys.stdout.buffer, event)
        except OSError:  # nobody is there to read it
            stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if exit_with_stdin:
        threading.Thread(target=_await_end_of_stdin, args=(loop, stop), name="stdin", daemon=True).start()
    try:
        await _serve(find_installation(), emit, **arguments)
    except asyncio.CancelledError:
        return 0
    except EmbeddedError as error:
        logger.error("%s", error)  # noqa: TRY400 - a traceback would say nothing more
        emit(Failed(str(error)))
    return 1


def _await_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop)


async def _serve(
    installation: Installation,
    emit: Callable[[Event], None],
    *,
    names: tuple[str, ...],
    repository: Path | None,
    grpc_port: int,
    metrics_port: int,
    device: str,
    **options: Any,
) -> None:
    """Serve until cancelled. For the main thread.

    Raises:
        EmbeddedError: the server could not be started; the message ends with the path of its log, if there is
            one.
    """
    _spare_numpy()
    # Not earlier: these import packages whose absence `find_installation` reports with a clear message.
    from triton_models.embedded.server import Ports, TritonServer  # noqa: PLC0415
    from triton_models.embedded.supervisor import Supervisor  # noqa: PLC0415

    try:
        run = RunDirectory.create(Path(tempfile.gettempdir()))
    except OSError as error:
        raise PlatformError(f"no folder for temporary files: {error}") from error
    keep_log = False
    arguments = trace_arguments(options["trace_endpoint"])
    try:
        if repository is None:
            device, reason = choose_device(device)
            emit(Notice(f"Running on {device}: {reason}"))
            if not names:
                emit(Notice(models.BUILT_IN_NOTICE))
            served = models.write_models(run.repository, names, device=device, options=options)
            # They are complete. To ask for more, Triton would start another process before the model's.
            arguments.append("--disable-auto-complete-config")
        else:
            served = models.find_models(repository)
        installation.link_backends(run.backends)
        server = TritonServer(
            installation,
            run,
            (repository or run.repository).resolve(),
            Ports(grpc=grpc_port, metrics=metrics_port),
            arguments=arguments,
        )
        await Supervisor(server, served, emit).run()
    except EmbeddedError as error:
        keep_log = run.log.exists()
        raise EmbeddedError(f"{error} (log: {run.log})" if keep_log else str(error)) from error
    finally:
        run.remove(keep_log=keep_log)


def _spare_numpy() -> None:
    """Have `tritonclient.grpc` be its generated messages alone, which saves this process 20 MB and 0.2 s.

    The rest of it, a client that nothing here uses, imports numpy.
    """
    package = types.ModuleType("tritonclient.grpc")
    spec = importlib.util.find_spec("tritonclient")
    folders = spec.submodule_search_locations if spec is not None else None
    package.__path__ = [f"{folder}/grpc" for folder in folders or ()]
    sys.modules[package.__name__] = package


if __name__ == "__main__":
    main()
