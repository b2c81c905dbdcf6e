import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deploy.docker.start_triton import main
from triton_models.embedded.models import NO_CONTEXT

CHECKPOINT = Path(__file__).parents[2] / "triton_models" / "checkpoints" / "chatglm3-demo"
KEY = {"TRITONGATE_REPOSITORY_KEY": "admin-key=s3cret"}


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where it makes its folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_it_becomes_a_tritonserver_on_entries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda name, command: replaced.append([name, *command]))
    arguments = ["--model", f"glm={CHECKPOINT}", "--kv-memory-gib", "2", "--", "--grpc-port=1234"]
    result = CliRunner(env=KEY | {"TRITONGATE_ENGINE_MAX_CONTEXT": "512"}).invoke(main, arguments)
    assert result.exit_code == 0, result.output
    ((name, own_name, *words),) = replaced
    assert (name, own_name, words[-1]) == ("tritonserver", "tritonserver", "--grpc-port=1234")
    flags = dict(word.split("=", 1) for word in words)
    assert flags["--model-load-thread-count"] == "2"
    assert set(NO_CONTEXT) <= set(words)
    repository = Path(flags["--model-repository"])
    (entry,) = repository.iterdir()
    assert entry.name == "glm"
    config = (entry / "config.pbtxt").read_text()
    assert json.dumps(str(CHECKPOINT)) in config
    assert "model_warmup" in config
    for option in ("kv_memory_gib", "max_context"):
        assert option in config


def test_every_flag_may_come_from_the_environment() -> None:
    context = main.make_context("start_triton.py", ["--model=/m", "--repository-key=a=b"])
    assert context.auto_envvar_prefix == "TRITONGATE_ENGINE"
    for option in main.params:
        for flag in option.opts if isinstance(option, click.Option) else ():
            assert option.name == flag.removeprefix("--").replace("-", "_")


def test_triton_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, command: replaced.append(command))
    assert CliRunner(env=KEY).invoke(main, ["--model", str(CHECKPOINT)]).exit_code == 0
    ((_, *words),) = replaced
    assert "--allow-http=false" in words
    (restricted,) = (word for word in words if word.startswith("--grpc-restricted-protocol="))
    protocols, _, key = restricted.partition("=")[2].rpartition(":")
    assert key == KEY["TRITONGATE_REPOSITORY_KEY"]
    assert {"model-repository", "shared-memory"} <= set(protocols.split(","))
    assert not {"health", "metadata", "model-config", "inference"} & set(protocols.split(","))


_START = """
import os
from deploy.docker.start_triton import main

os.execvp = lambda *_: os.execv("/bin/sh", ["sh", "-c", "echo started; read end"])
main()
"""


def started(folder: Path) -> "subprocess.Popen[bytes]":
    """Start it with a program in the place of tritonserver that goes on until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _START, "--model", str(CHECKPOINT)],
        env=os.environ | KEY | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    return process


def test_a_start_leaves_nothing_of_servers_that_have_ended(temporary: Path) -> None:
    def folders() -> set[Path]:
        return set(temporary.iterdir())

    foreign = temporary / "tritongate-repository-file"
    foreign.write_text("no folder", encoding="utf-8")
    with started(temporary):
        (of_first,) = folders() - {foreign}
        with started(temporary) as second:  # beside it, as for another GPU
            (of_second,) = folders() - {of_first, foreign}
            second.kill()
    assert folders() == {of_first, of_second, foreign}
    with started(temporary) as third:
        assert len(folders() - {foreign}) == 1
        assert not folders() & {of_first, of_second}
        third.kill()


def test_without_a_key_it_does_not_start() -> None:
    result = CliRunner().invoke(main, ["--model", str(CHECKPOINT)])
    assert result.exit_code == 2
    assert "--repository-key" in result.output


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    result = CliRunner(env=KEY).invoke(main, ["--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "no config.json" in result.output
