"""One run of the embedded server, from its options to its end."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from triton_models.embedded import models
from triton_models.embedded.device import choose_device
from triton_models.embedded.errors import EmbeddedError, PlatformError
from triton_models.embedded.installation import Installation
from triton_models.embedded.log import ServerLog
from triton_models.embedded.models import ModelOptions, Served
from triton_models.embedded.ports import Ports
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.supervisor import Supervisor
from triton_models.tracing import trace_arguments
from wire.events import Event, Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to serve and where."""

    models: tuple[str, ...]
    """`[NAME=]DIR` of each model; empty: the built-in model."""
    repository: Path | None
    """A model repository to serve as it is, instead of `models`."""
    ports: Ports
    common: ModelOptions
    """Its device may be `auto`."""


def serve(
    options: Options, installation: Installation, stop: threading.Event, emit: Callable[[Event], None]
) -> None:
    """Serve until `stop` is set. Call it from the main thread.

    Raises:
        EmbeddedError: the server could not be started; the message ends with the path of its log, if there is
            one.
    """
    try:
        run = RunDirectory.create()
    except OSError as error:
        raise PlatformError(f"no folder for temporary files: {error}") from error
    served = False
    try:
        repository, found = _repository(options, run, emit)
        installation.link_backends(run.backends)
        log = ServerLog(run.log)
        try:
            supervisor = Supervisor(
                installation=installation,
                run=run,
                repository=repository,
                models=found,
                asked_ports=options.ports,
                log=log,
                emit=emit,
                arguments=trace_arguments(options.common.trace_endpoint),
            )
            supervisor.run(stop)
            served = True
        except EmbeddedError as error:
            raise type(error)(f"{error} (log: {log.path})") from error
        finally:
            log.close()
    finally:
        run.remove(keep_log=not served and run.log.exists())


def _repository(
    options: Options, run: RunDirectory, emit: Callable[[Event], None]
) -> tuple[Path, list[Served]]:
    if options.repository is not None:
        repository = options.repository.resolve()
        return repository, models.find_models(repository)
    device, reason = choose_device(options.common.device)
    emit(Notice(f"Running on {device}: {reason}"))
    if not options.models:
        emit(Notice(models.BUILT_IN_NOTICE))
    common = replace(options.common, device=device)
    return run.repository, models.write_models(run.repository, options.models, common)
