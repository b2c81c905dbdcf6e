import asyncio
import errno
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.e2e.up_process import wait_until
from triton_models.embedded import server
from triton_models.embedded.errors import ServerError
from triton_models.embedded.installation import Installation
from triton_models.embedded.server import (
    ERROR,
    LINE,
    PROGRESS,
    SIZE,
    UNCAUGHT,
    Ports,
    ServerLog,
    TritonServer,
)
from triton_models.embedded.warden import RunDirectory

ERROR_LINE = b'E1121 09:55:12.868396 4723 main.cc:535] "failed to start GRPC service"\n'
THROWN = "echo \"terminate called after throwing an instance of 'boost::interprocess::lock_exception'\" >&2"


def test_zero_becomes_a_free_port_and_a_number_stays() -> None:
    free = Ports().choose()
    assert 0 not in (free.grpc, free.metrics)
    assert free.grpc != free.metrics
    assert free.choose() == free


def test_a_port_with_a_listener_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"metrics port {port} is not available.*; --metrics-port"):
            Ports(metrics=port).choose()


def test_a_port_asked_for_twice_is_refused() -> None:
    port = Ports().choose().grpc
    with pytest.raises(ServerError, match=f"metrics port {port}"):
        Ports(grpc=port, metrics=port).choose()


def test_a_port_whose_connections_wait_for_their_end_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the server's side closes first, and waits
            assert client.recv(1) == b""
    assert Ports(grpc=port).choose().grpc == port


def write(log: ServerLog, output: bytes) -> None:
    """Write it as the next server's."""
    log.mark()
    os.write(log.file, output)


@pytest.fixture
def log(tmp_path: Path) -> ServerLog:
    return ServerLog(tmp_path / "triton.log")


def test_the_last_that_fits_is_found(log: ServerLog) -> None:
    assert log.last(LINE) is None
    write(log, b"libx.so: cannot open\n" + ERROR_LINE + b'I1121 09:55:12.8 47 a.cc:5] "bye"\n\n')
    assert log.last(ERROR) == "failed to start GRPC service"
    assert log.last(LINE) == 'I1121 09:55:12.8 47 a.cc:5] "bye"'
    assert log.last(UNCAUGHT) is None
    write(log, b"terminate called after throwing an instance of 'std::bad_alloc'\nwhat(): ...\n")
    assert log.last(UNCAUGHT) == "std::bad_alloc"
    assert log.last(ERROR) is None  # that was another server's
    assert len(log.path.read_text().splitlines()) == 6


def test_progress_bars_are_read(log: ServerLog) -> None:
    write(log, b"loading m:  43%|####      | 3/7\rloading m: 100%|##########| 7/7\n")
    assert log.last(PROGRESS) == "100"
    log.mark()
    assert log.last(PROGRESS) is None
    write(log, b"loading m:  43%|####      | 3/7\r")
    assert (log.last(PROGRESS), log.last(SIZE)) == ("43", None)
    write(log, b"loading m:  43%|####      | 3.01G/7.25G [00:01<00:02, 2.3GB/s]\r")
    assert log.last(SIZE) == "7.25G"


def test_the_file_is_bounded_while_a_server_writes(log: ServerLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_LOG_BYTES", 1000)
    for number in range(50):
        os.write(log.file, b"%099d\n" % number)
        log.trim()
    os.write(log.file, ERROR_LINE)
    assert sum(path.stat().st_size for path in log.path.parent.iterdir()) <= 2200
    assert log.last(ERROR) == "failed to start GRPC service"


def test_a_full_disk_and_a_log_that_somebody_removed_stop_nothing(
    log: ServerLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_LOG_BYTES", 100)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
        os.write(log.file, b"x" * 200)
        log.trim()
        assert log.path.stat().st_size == 0
    log.path.unlink()
    os.write(log.file, b"x" * 200 + b"\n" + ERROR_LINE)
    assert log.last(ERROR) == "failed to start GRPC service"
    log.trim()
    log.mark()
    assert log.last(ERROR) is None


@pytest.fixture
def end_of(tmp_path: Path) -> Callable[[str], Awaitable[str]]:
    """Return what is said about a server that is this shell script."""

    async def end_of(script: str) -> str:
        program = tmp_path / "tritonserver"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        started = TritonServer(
            Installation(server=program, backend=(), library_path=()),
            RunDirectory(tmp_path),
            tmp_path,
            Ports().choose(),
        )
        with pytest.raises(ServerError) as raised:
            await started.start()
        assert raised.value.transient == ("kill" in script)
        return str(raised.value)

    return end_of


async def test_an_abort_names_the_exception_that_nobody_caught(
    end_of: Callable[[str], Awaitable[str]],
) -> None:
    expected = "tritonserver was killed by signal 6: uncaught boost::interprocess::lock_exception"
    assert await end_of(f"{THROWN}; echo '  what():  x' >&2; kill -ABRT $$") == expected


async def test_a_load_that_begins_while_a_server_dies_does_not_lose_its_words(tmp_path: Path) -> None:
    program, go = tmp_path / "tritonserver", tmp_path / "go"
    program.write_text(
        f"#!/bin/sh\n{THROWN}\nuntil [ -e {go} ]; do sleep 0.05; done\nkill -ABRT $$\n", encoding="utf-8"
    )
    program.chmod(0o755)
    installation = Installation(server=program, backend=(), library_path=())
    dying = TritonServer(installation, RunDirectory(tmp_path), tmp_path, Ports().choose())
    starting = asyncio.create_task(dying.start())
    await asyncio.to_thread(wait_until, lambda: dying.log.last(UNCAUGHT) is not None)
    dying.log.mark()
    go.touch()
    with pytest.raises(ServerError, match="uncaught boost::interprocess::lock_exception"):
        await starting


async def test_other_ends_are_not_blamed_on_an_exception(end_of: Callable[[str], Awaitable[str]]) -> None:
    assert await end_of("kill -ABRT $$") == "tritonserver was killed by signal 6"
    expected = "tritonserver was killed by signal 6: terminate called recursively"
    assert await end_of("echo begun; echo terminate called recursively; kill -ABRT $$") == expected
    # The exception was a stub's, then.
    assert await end_of(f"{THROWN}; kill -KILL $$") == "tritonserver was killed by signal 9"
    assert await end_of("echo no library; exit 3") == "tritonserver ended with status 3: no library"


async def test_a_port_that_was_taken_meanwhile_is_chosen_anew_by_another_start(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    installation = Installation(server=program, backend=(), library_path=())
    for requested in (Ports(), Ports().choose()):
        server = TritonServer(installation, RunDirectory(tmp_path), tmp_path, requested)
        with pytest.raises(ServerError, match="ended with status 1") as raised:
            await server.start()
        assert raised.value.transient == (requested == Ports())
        tried = server.ports
        with pytest.raises(ServerError, match="ended with status 1"):
            await server.start()
        assert (server.ports == tried) == (requested != Ports())
