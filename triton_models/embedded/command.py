"""The command line of the embedded Triton, and what it starts."""

import asyncio
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from triton_models.embedded import models
from triton_models.embedded.errors import EmbeddedError, SetupError
from triton_models.embedded.installation import choose_device, find_installation
from triton_models.embedded.models import NO_CONTEXT
from triton_models.embedded.server import Ports, TritonServer, new_key
from triton_models.embedded.supervisor import Supervisor
from triton_models.embedded.warden import RunDirectory
from triton_models.tracing import trace_arguments
from wire.events import Event, Failed, Notice, write_event
from wire.flags import model_flags

_NOT_IN_PATHS = re.compile(r"""[\s|&;<>()$`\\"']|[^\x00-\x7f]""")
"""What Triton cannot have in an entry's path: it starts the entry's process by a shell, without quotes, and
the Python of that process takes names of files for ASCII when it imports `model.py`."""


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
@click.option(
    "--load-at-start",
    type=click.IntRange(min=1),
    show_default="all",
    help="How many models to load, the first ones; the others wait until somebody asks Triton to load them.",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda:N")
@click.option(
    "--repository-key",
    envvar="TRITONGATE_REPOSITORY_KEY",
    default=new_key,
    show_default="a new one",
    metavar="KEY=VALUE",
    help="What Triton demands for the repository and more.",
)
@model_flags()
def main(**arguments: Any) -> None:
    """Serve models on the tritonserver of the nvidia-pytriton wheel, on 127.0.0.1 only.

    What happens is said on standard output, one JSON document a line. It stops when standard input ends, as
    it does with the parent.
    """
    if arguments["names"] and arguments["repository"]:
        raise click.UsageError("--model and --repository exclude each other")
    with asyncio.Runner() as runner:
        status = runner.run(_run(arguments))
        # Here, since the loop's end would give signals back to Python, whose answer is a traceback.
        os._exit(status)


async def _run(arguments: Mapping[str, Any]) -> int:
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

    # The loop is woken by a signal, even by one that comes just before it begins to wait.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    threading.Thread(target=_await_end_of_stdin, args=(loop, stop), name="stdin", daemon=True).start()
    try:
        await _serve(emit, **arguments)
    except asyncio.CancelledError:
        return 0
    except (EmbeddedError, OSError) as error:  # the second: a full disk, or files of somebody else
        emit(Failed(str(error)))
    return 1


def _await_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop)


async def _serve(
    emit: Callable[[Event], None],
    *,
    names: tuple[str, ...],
    repository: Path | None,
    grpc_port: int,
    metrics_port: int,
    load_at_start: int | None,
    device: str,
    repository_key: str,
    **options: Any,
) -> None:
    """Serve until cancelled. For the main thread.

    Raises:
        EmbeddedError: the server could not be started; the message ends with its log's path, if there is one.
        OSError: the files that it needs could not be written.
    """
    installation = find_installation()
    arguments = trace_arguments(options["trace_endpoint"])
    if repository is None:
        device, reason = choose_device(device)
        emit(Notice(f"Running on {device}: {reason}"))
        if not names:
            emit(Notice(models.BUILT_IN_NOTICE))
    await asyncio.sleep(0)  # a signal that has come by now leaves nothing to clean up
    run = RunDirectory.create(Path(tempfile.gettempdir()))
    try:
        if repository is None:
            served = models.write_models(run.repository, names, device=device, options=options)
            # They are complete. To ask for more, Triton would start another process before the model's.
            arguments += [*NO_CONTEXT, "--disable-auto-complete-config"]
        else:
            configs = repository.glob("*/config.pbtxt")  # noqa: ASYNC240 - nothing waits yet
            served = sorted(config.parent.name for config in configs)
            if not served:
                raise SetupError(f"{repository} holds no model: no folder with a config.pbtxt")
        where = (repository or run.repository).resolve()
        for path in (run.backends, *(where / name for name in served)):
            if found := _NOT_IN_PATHS.search(str(path)):
                what = "TMPDIR" if path == run.backends else "folder"
                raise SetupError(
                    f"Triton cannot start models in {str(path)!r}, for the {found[0]!r} in it: "
                    f"choose another {what}"
                )
        installation.link_backends(run.backends)
        ports = Ports(grpc=grpc_port, metrics=metrics_port)
        server = TritonServer(installation, run, where, ports, arguments, repository_key)
        await Supervisor(server, served, emit, at_start=load_at_start).run()
    except EmbeddedError as error:
        kept = run.log.exists() and run.log.stat().st_size > 0
        raise EmbeddedError(f"{error} (log: {run.keep_log()})" if kept else str(error)) from error
    finally:
        run.remove()
