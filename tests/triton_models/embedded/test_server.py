import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from triton_models.embedded import ports
from triton_models.embedded.errors import ServerError
from triton_models.embedded.installation import Installation
from triton_models.embedded.log import ServerLog
from triton_models.embedded.ports import Ports
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.server import TritonServer

THROWN = "echo \"terminate called after throwing an instance of 'boost::interprocess::lock_exception'\" >&2"


@pytest.fixture
def end_of(tmp_path: Path) -> Callable[[str], str]:
    """Return what is said about a server that is this shell script."""

    def end_of(script: str) -> str:
        program = tmp_path / "tritonserver"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        log = ServerLog(tmp_path / "triton.log")
        server = TritonServer(
            Installation(server=program, backend=tmp_path, stub=tmp_path, library_path=()),
            RunDirectory(tmp_path),
            tmp_path,
            ports.choose(Ports(http=0, grpc=0, metrics=0)),
            log,
        )
        try:
            with pytest.raises(ServerError) as raised:
                server.start(threading.Event())
        finally:
            log.close()
        return str(raised.value)

    return end_of


def test_an_abort_names_the_exception_that_nobody_caught(end_of: Callable[[str], str]) -> None:
    expected = "tritonserver was killed by signal 6: uncaught boost::interprocess::lock_exception"
    assert end_of(f"{THROWN}; echo '  what():  x' >&2; kill -ABRT $$") == expected


def test_other_ends_are_not_blamed_on_an_exception(end_of: Callable[[str], str]) -> None:
    assert end_of("kill -ABRT $$") == "tritonserver was killed by signal 6"
    assert end_of(f"{THROWN}; kill -KILL $$") == "tritonserver was killed by signal 9"  # a stub's, then
    assert end_of("echo no library; exit 3") == "tritonserver ended with status 3: no library"
