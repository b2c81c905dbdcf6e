import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from triton_models import build
from triton_models.build import TRITON, main
from triton_models.embedded.models import NO_CONTEXT
from triton_models.errors import EnvironmentPackError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def parameters(out: Path, name: str) -> dict[str, str]:
    config = text_format.Parse((out / "repository" / name / "config.pbtxt").read_text(), pb.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been packed."""
    calls: list[Any] = []

    def pack(out: Path, **how: Any) -> str:
        calls.append(how)
        out.write_text("packages")
        return "packed"

    monkeypatch.setattr(build, "pack", pack)
    return calls


def test_everything_is_in_the_repository(tmp_path: Path, packed: list[Any]) -> None:
    limits = ("--constraint", ROOT / "constraints.txt")
    out = tmp_path / "new" / "out"
    status, said = run(
        "--model", f"glm={GOLDEN}/chatglm3", "--out", out, "--python", "/py", *limits, "--max-running", 7
    )
    assert (status, packed) == (0, [{"python": "/py", "constraints": (ROOT / "constraints.txt",)}])
    assert f"docker build {out}" in said
    assert parameters(out, "glm") == {
        "checkpoint": "checkpoint",
        "device": "cuda:0",
        "format": "chatglm3",
        "EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/environment.tar.gz",
        "max_running": "7",
    }
    entry = out / "repository" / "glm"
    assert (entry / "environment.tar.gz").read_text() == "packages"
    assert {path.name for path in (entry / "warmup").iterdir()} == {"prompt", "history", "sampling"}
    for path in (GOLDEN / "chatglm3").iterdir():
        assert (entry / "checkpoint" / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out.stat().st_mode & 0o755) == 0o755


def test_the_format_that_only_the_directorys_name_tells_is_kept(tmp_path: Path) -> None:
    tuned = tmp_path / "my-chatglm2"
    shutil.copytree(GOLDEN / "chatglm2", tuned)
    (tuned / "tokenizer_config.json").unlink()
    assert run("--model", tuned, "--out", tmp_path / "out", "--no-environment")[0] == 0
    assert parameters(tmp_path / "out", "my-chatglm2")["format"] == "chatglm2"


def test_weights_that_are_not_read_are_not_copied(tmp_path: Path) -> None:
    """Published directories often hold them twice, as safetensors and as pickles."""
    both = tmp_path / "both"
    shutil.copytree(GOLDEN / "chatglm3", both)
    (both / "original").mkdir()
    for name in (
        *("pytorch_model-00001-of-00001.bin", "original/consolidated.00.pth", "original/params.json"),
        *("original/model.safetensors", "[fp32] model.safetensors"),
    ):
        (both / name).write_text("large")
    assert run("--model", both, "--out", tmp_path / "out", "--no-environment")[0] == 0
    copy = tmp_path / "out" / "repository" / "both" / "checkpoint"
    found = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert found == {path.name for path in (GOLDEN / "chatglm3").iterdir()} | {"original/params.json"}


def test_a_checkpoint_may_be_linked_and_packages_be_there_already(tmp_path: Path, packed: list[Any]) -> None:
    archive = tmp_path / "before.tar.gz"
    with tarfile.open(archive, "w:gz") as packages:
        packages.add(GOLDEN / "chatglm3" / "config.json", "before")
    model = ("--model", GOLDEN / "chatglm3", "--name", "other", "--out", tmp_path / "out")
    assert run(*model, "--link", "--archive", archive)[0] == 0
    entry = tmp_path / "out" / "repository" / "other"
    assert (entry / "checkpoint").readlink() == GOLDEN / "chatglm3"
    assert (entry / "environment.tar.gz").read_bytes() == archive.read_bytes()
    assert packed == []
    assert f"--volume {GOLDEN}/chatglm3:{GOLDEN}/chatglm3:ro IMAGE" in (
        tmp_path / "out" / "Dockerfile"
    ).read_text(encoding="utf-8")


def test_without_packages_there_is_no_image(tmp_path: Path, packed: list[Any]) -> None:
    (tmp_path / "out").mkdir()
    assert run("--model", GOLDEN / "chatglm3", "--out", tmp_path / "out", "--no-environment")[0] == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["repository"]
    assert packed == []
    assert "EXECUTION_ENV_PATH" not in parameters(tmp_path / "out", "chatglm3")


def test_the_empty_folder_may_be_a_link_or_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    for out, place in ((Path(), "here"), (tmp_path / "link", "there")):
        assert run("--model", GOLDEN / "chatglm3", "--out", out, "--no-environment")[0] == 0
        assert (tmp_path / place / "repository" / "chatglm3" / "config.pbtxt").is_file()
    assert (tmp_path / "link").is_symlink()


def test_the_dockerfile(tmp_path: Path, packed: list[Any]) -> None:
    assert run("--model", GOLDEN / "chatglm3", "--out", tmp_path / "out", "--python", "p")[0] == 0
    path = tmp_path / "out" / "Dockerfile"
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--config", ROOT / ".hadolint.yaml", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text(encoding="utf-8")
    assert f"ARG TRITON={TRITON}\n" in (ROOT / "deploy/docker/triton.Dockerfile").read_text(encoding="utf-8")
    assert f"ARG TRITON={TRITON}\n" in text
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    words = shlex.split(entrypoint.strip("[]").replace('", "', '" "'))
    # What the shell makes of it: an error without the key, the flags with it.
    program = words[2].replace("exec tritonserver", "echo")
    shown = [
        subprocess.run(
            [*words[:2], program, words[3], "--log-verbose=1"],
            env=key,
            capture_output=True,
            text=True,
            check=False,
        )
        for key in ({}, {"TRITONGATE_REPOSITORY_KEY": "k=v"})
    ]
    assert shown[0].returncode != 0
    assert "TRITONGATE_REPOSITORY_KEY: is not set" in shown[0].stderr
    flags = shown[1].stdout.split()
    assert flags[0] == "--model-repository=/models"
    assert {"--disable-auto-complete-config", *NO_CONTEXT} <= set(flags)
    assert flags[-2].endswith(":k=v")
    assert flags[-1] == "--log-verbose=1"


@pytest.mark.parametrize(("device", "flag"), [("cpu", ""), ("cuda:1", " --gpus all")])
def test_only_a_model_on_a_gpu_is_run_with_gpus(
    tmp_path: Path, packed: list[Any], device: str, flag: str
) -> None:
    run("--model", GOLDEN / "chatglm3", "--out", tmp_path / "out", "--python", "p", "--device", device)
    text = (tmp_path / "out" / "Dockerfile").read_text(encoding="utf-8")
    assert f"# docker run{flag} --shm-size 1g" in text


def test_the_images_python_is_looked_for(
    tmp_path: Path, packed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_IMAGES_PYTHON", "python3.99")
    status, said = run("--model", GOLDEN / "chatglm3", "--out", tmp_path / "out")
    assert (status, "python3.99, which NVIDIA's images have, is not on PATH" in said) == (2, True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert run("--model", GOLDEN / "chatglm3", "--out", tmp_path / "out")[0] == 0
    assert packed[0]["python"] == "/bin/python3.99"


def test_what_cannot_be_built_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, weightless, unknown = tmp_path / "full", tmp_path / "weightless", tmp_path / "unknown"
    for folder in (full, weightless, unknown):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "chatglm"}')
    (unknown / "model.safetensors").touch()
    out = ("--out", tmp_path / "out", "--no-environment")
    archive = tmp_path / "full" / "environment.tar.gz"
    tarfile.open(archive, "w:gz").close()
    golden = ("--model", GOLDEN / "chatglm3")
    for arguments, words in (
        ((*golden, "--out", full), "full is not empty"),
        ((*golden, "--out", GOLDEN / "chatglm3" / "out"), "is in the checkpoint's own folder"),
        (("--model", tmp_path / "absent", *out), "absent is not a directory"),
        (("--model", tmp_path, *out), "has no config.json, so it is no checkpoint"),
        (("--model", weightless, *out), "no weights"),
        (("--model", unknown, *out), "unknown"),
        ((*golden, *out, "--name", "a/b"), "cannot be a model's name"),
        ((*golden, *out, "--device", "auto"), "is not a device: cpu or cuda:N"),
        ((*golden, *out, "--max-running", "0"), "max_running must be at least 1"),
        ((*golden, *out, "--archive", archive), "it excludes"),
        ((*golden, "--out", tmp_path / "out", "--archive", full / "config.json"), "is no archive of tar"),
        ((*golden, *out, "--triton", "a b"), "'a b' is no tag of an image"),
    ):
        status, said = run(*arguments)
        assert status != 0
        assert words in said
        assert "Traceback" not in said
    monkeypatch.setattr(build, "pack", _fails)
    status, said = run(*golden, "--out", tmp_path / "out", "--python", "p")
    assert (status, "Error: no pip" in said) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "unknown", "weightless"]


def _fails(*_: object, **__: object) -> str:
    raise EnvironmentPackError("no pip")
