"""`python -m triton_models.embedded`: the embedded Triton as a process; events on stdout, logs on stderr."""

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from triton_models.embedded.errors import EmbeddedError
from triton_models.embedded.installation import find_installation
from triton_models.embedded.model_flags import model_flags
from triton_models.embedded.ports import Ports
from wire.events import Event, Failed, write_event

_STOPS = frozenset({signal.SIGTERM, signal.SIGINT})

logger = logging.getLogger(__name__)


class Emitter:
    """Writes events to the parent, from any thread; if the parent is gone, sets `stop`."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write `event`."""
        with self._lock:
            try:
                write_event(sys.stdout.buffer, event)
            except OSError:
                self._stop.set()


@click.command()
@click.option(
    "--model", "models", multiple=True, metavar="[NAME=]DIR", help="A checkpoint to serve; repeatable."
)
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Serve the entries of this model repository instead of --model.",
)
@click.option("--http-port", default=0, show_default="any free", type=click.IntRange(0, 65535))
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
def main(
    *,
    models: tuple[str, ...],
    repository: Path | None,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    device: str,
    exit_with_stdin: bool,
    log_level: str,
    **flags: Any,
) -> None:
    """Serve models on the tritonserver of the nvidia-pytriton wheel, on 127.0.0.1 only."""
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    # Before any other thread starts: threads inherit the mask, so only the waiting one gets these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    threading.Thread(target=_stop_on_signal, args=(stop,), name="signals", daemon=True).start()
    if exit_with_stdin:
        threading.Thread(target=_stop_at_end_of_stdin, args=(stop,), name="stdin", daemon=True).start()
    emit = Emitter(stop)
    if models and repository:
        raise click.UsageError("--model and --repository exclude each other")
    try:
        installation = find_installation()
        # Not earlier: these import packages whose absence find_installation reports with a clear message.
        from triton_models.embedded.models import ModelOptions  # noqa: PLC0415
        from triton_models.embedded.service import Options, serve  # noqa: PLC0415

        common = ModelOptions(device=device, **flags)
        ports = Ports(http=http_port, grpc=grpc_port, metrics=metrics_port)
        serve(
            Options(models=models, repository=repository, ports=ports, common=common),
            installation,
            stop,
            emit,
        )
    except EmbeddedError as error:
        logger.error("%s", error)  # noqa: TRY400 - a traceback would say nothing more
        emit(Failed(str(error)))
        sys.exit(1)


def _stop_on_signal(stop: threading.Event) -> None:
    """Wait for the first signal; later ones are ignored, since stopping takes a bounded time anyway."""
    signal.sigwait(_STOPS)
    stop.set()


def _stop_at_end_of_stdin(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
