import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from triton_models.embedded import server
from triton_models.embedded.errors import ServerError
from triton_models.embedded.installation import Installation
from triton_models.embedded.server import Ports, ServerLog, TritonServer
from triton_models.embedded.warden import RunDirectory

ERROR = b'E1121 09:55:12.868396 4723 main.cc:535] "failed to start GRPC service"\n'
THROWN = "echo \"terminate called after throwing an instance of 'boost::interprocess::lock_exception'\" >&2"


def test_zero_becomes_a_free_port_and_a_number_stays() -> None:
    free = Ports().choose()
    assert 0 not in (free.grpc, free.metrics)
    assert free.grpc != free.metrics
    assert free.choose() == free


def test_a_port_with_a_listener_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"metrics port {port} is not available"):
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
    descriptor = log.open()
    os.write(descriptor, output)
    os.close(descriptor)


@pytest.fixture
def log(tmp_path: Path) -> ServerLog:
    return ServerLog(tmp_path / "triton.log")


def test_the_last_error_is_the_complaint(log: ServerLog) -> None:
    write(log, b"libx.so: cannot open\n" + ERROR + b'I1121 09:55:12.8 47 a.cc:5] "bye"\n')
    assert log.last_error == "failed to start GRPC service"
    assert log.complaint == "failed to start GRPC service"
    assert len(log.path.read_text().splitlines()) == 3


def test_without_an_error_the_last_unusual_line_is(log: ServerLog) -> None:
    assert log.complaint == "it said nothing"
    write(log, b'I1121 09:55:12.8 47 a.cc:5] "hello"\ntritonserver: libx.so: cannot open')
    assert log.complaint == "tritonserver: libx.so: cannot open"
    write(log, b"")
    assert log.complaint == "it said nothing"


def test_what_aborted_the_server_is_its_uncaught_exception(log: ServerLog) -> None:
    write(log, b"hello\nterminate called after throwing an instance of 'std::bad_alloc'\nwhat(): ...\n")
    assert log.uncaught == "std::bad_alloc"
    write(log, b"that was another server\n")
    assert log.uncaught is None


def test_progress_bars_are_read(log: ServerLog) -> None:
    write(log, b"loading m:  43%|####      | 3/7\rloading m: 100%|##########| 7/7\n")
    assert log.progress == 1.0
    log.begin_load()
    assert log.progress is None
    write(log, b"loading m:  43%|####      | 3/7\r")
    assert log.progress == 0.43


def test_the_file_is_bounded_while_a_server_writes(log: ServerLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_LOG_BYTES", 1000)
    descriptor = log.open()
    for number in range(50):
        os.write(descriptor, b"%099d\n" % number)
        log.trim()
    os.write(descriptor, ERROR)
    os.close(descriptor)
    assert sum(path.stat().st_size for path in log.path.parent.iterdir()) <= 2200
    assert log.complaint == "failed to start GRPC service"


def test_a_full_disk_and_a_log_that_somebody_removed_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ServerLog(tmp_path / "triton.log")
    log.trim()
    log.begin_load()
    monkeypatch.setattr(server, "_MAX_LOG_BYTES", 100)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(server.shutil, "copyfile", full)
    log.path.write_bytes(b"x" * 200)
    log.trim()
    assert log.path.stat().st_size == 0


@pytest.fixture
def end_of(tmp_path: Path) -> Callable[[str], Awaitable[str]]:
    """Return what is said about a server that is this shell script."""

    async def end_of(script: str) -> str:
        program = tmp_path / "tritonserver"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        started = TritonServer(
            Installation(server=program, backend=tmp_path, stub=tmp_path, library_path=()),
            RunDirectory(tmp_path),
            tmp_path,
            Ports().choose(),
        )
        with pytest.raises(ServerError) as raised:
            await started.start()
        assert raised.value.crashed == ("kill" in script)
        return str(raised.value)

    return end_of


async def test_an_abort_names_the_exception_that_nobody_caught(
    end_of: Callable[[str], Awaitable[str]],
) -> None:
    expected = "tritonserver was killed by signal 6: uncaught boost::interprocess::lock_exception"
    assert await end_of(f"{THROWN}; echo '  what():  x' >&2; kill -ABRT $$") == expected


async def test_other_ends_are_not_blamed_on_an_exception(end_of: Callable[[str], Awaitable[str]]) -> None:
    assert await end_of("kill -ABRT $$") == "tritonserver was killed by signal 6"
    # The exception was a stub's, then.
    assert await end_of(f"{THROWN}; kill -KILL $$") == "tritonserver was killed by signal 9"
    assert await end_of("echo no library; exit 3") == "tritonserver ended with status 3: no library"


async def test_a_port_that_was_taken_meanwhile_is_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Ports] = []

    async def start(self: TritonServer) -> None:
        tried.append(self.ports)
        raise ServerError("tritonserver ended with status 1: failed to start GRPC service")

    monkeypatch.setattr(TritonServer, "_start", start)
    installation = Installation(server=tmp_path, backend=tmp_path, stub=tmp_path, library_path=())
    for asked, attempts in ((Ports(), 3), (Ports().choose(), 1)):
        tried.clear()
        with pytest.raises(ServerError, match="GRPC service"):
            await TritonServer(installation, RunDirectory(tmp_path), tmp_path, asked).start()
        assert len(tried) == attempts
