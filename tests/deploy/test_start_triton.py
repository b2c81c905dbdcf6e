import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.docker.start_triton import main

CHECKPOINT = Path(__file__).parents[2] / "triton_models" / "checkpoints" / "chatglm3-demo"


def test_it_becomes_a_tritonserver_on_entries_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    replaced: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda name, command: replaced.append([name, *command]))
    arguments = ["--model", f"glm={CHECKPOINT}", "--kv-memory-gib", "2", "--", "--http-port=1234"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    ((name, own_name, where, threads, port),) = replaced
    assert (name, own_name, port) == ("tritonserver", "tritonserver", "--http-port=1234")
    assert threads == "--model-load-thread-count=4"
    repository = Path(where.removeprefix("--model-repository="))
    assert sorted(path.name for path in repository.iterdir()) == ["glm", "glm-stream", "glm-tokenizer"]
    configs = {path.parent.name: path.read_text() for path in repository.glob("*/config.pbtxt")}
    assert json.dumps(str(CHECKPOINT)) in configs["glm"]
    assert "kv_memory_gib" in configs["glm-stream"]
    assert "model_warmup" in configs["glm-stream"]


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "no config.json" in result.output
