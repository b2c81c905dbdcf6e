import asyncio
from pathlib import Path
from typing import Any, Never
from unittest.mock import Mock

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from triton_models.embedded import command
from triton_models.embedded.errors import EmbeddedError
from triton_models.embedded.models import NO_CONTEXT
from triton_models.embedded.server import TritonServer
from triton_models.entries import ModelEntry, write_entry
from wire.options import OPTIONS


class Seen:
    """What a supervisor was given, in place of one: the server's command, and its entries."""

    command: list[str]
    entries: dict[str, Any]

    def __init__(self, server: TritonServer, served: list[str], *_: object, at_start: int | None) -> None:
        Seen.command = server._command()
        Seen.entries = {
            name: text_format.Parse((server.repository / name / "config.pbtxt").read_text(), pb.ModelConfig())
            for name in served
        }

    async def run(self) -> Never:
        raise asyncio.CancelledError


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Prepare everything on a machine with GPUs, and start nothing; return what would have run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(command, "find_installation", Mock)
    monkeypatch.setattr(command, "choose_device", lambda asked: (asked, "asked for"))
    monkeypatch.setattr(command, "Supervisor", Seen)

    async def serve(repository: Path | None = None) -> type[Seen]:
        options = dict.fromkeys(option.name for option in OPTIONS)
        where = {"grpc_port": 0, "metrics_port": 0, "device": "cuda:1", "repository_key": "k=v"}
        options |= where | {"load_at_start": None}
        with pytest.raises(asyncio.CancelledError):
            await command._serve(Mock(), names=(), repository=repository, **options)
        return Seen

    return serve


@pytest.mark.parametrize("folder", ["a b", "a$b", "it's", "a&b", "模型"])
async def test_a_path_in_which_triton_cannot_start_a_model_is_refused(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Without that, a load fails after ten seconds with no word of the path."""
    odd = tmp_path / folder
    write_entry(odd, model=ModelEntry(name="m", checkpoint="/c"))
    with pytest.raises(EmbeddedError, match="choose another folder"):
        await serve(odd)
    monkeypatch.setenv("TMPDIR", str(odd))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(EmbeddedError, match="choose another TMPDIR"):
        await serve()
    assert [*odd.glob("tritongate-*/*")] == []


async def test_a_path_of_other_characters_is_served(serve: Any, tmp_path: Path) -> None:
    odd = tmp_path / "models-_1.0=:,@+~#"
    write_entry(odd, model=ModelEntry(name="m", checkpoint="/c"))
    assert f"--model-repository={odd}" in (await serve(odd)).command


async def test_tritonserver_itself_uses_no_gpu(serve: Any) -> None:
    """The model alone is told of it: so the server needs no CUDA context, which takes memory of each GPU."""
    seen = await serve()
    assert {*NO_CONTEXT, "--disable-auto-complete-config"} <= set(seen.command)
    ((name, config),) = seen.entries.items()
    assert name == "chatglm3-demo"
    assert config.parameters["device"].string_value == "cuda:1"
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus)) == (pb.ModelInstanceGroup.KIND_CPU, [])


async def test_entries_of_others_may_name_gpus_to_it(serve: Any, tmp_path: Path) -> None:
    write_entry(tmp_path / "theirs", model=ModelEntry(name="m", checkpoint="/c"))
    seen = await serve(tmp_path / "theirs")
    assert list(seen.entries) == ["m"]
    assert not {flag.partition("=")[0] for flag in seen.command} & {
        flag.partition("=")[0] for flag in (*NO_CONTEXT, "--disable-auto-complete-config")
    }
