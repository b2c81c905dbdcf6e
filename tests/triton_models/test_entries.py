import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from triton_models.entries import ModelEntry, write_entry
from triton_models.options import EntryParameters, read_parameters
from wire.history import decode_history
from wire.options import OPTIONS
from wire.request import Generation, decode_request
from wire.strings import unpack_strings

MODELS = Path(__file__).parents[2] / "triton_models"
DEMO = "chatglm3-demo"
OPTIONS_SET = {
    "format": "chatglm2",
    "engine": "own",
    "dtype": "bfloat16",
    "quantization": "int4",
    "max_context": 4096,
    "kv_memory_gib": 1.5,
    "memory_share": 0.5,
    "max_running": 8,
    "max_waiting": 16,
    "max_batched_tokens": 256,
    "burst_tokens": 512,
    "burst_steps": 4,
    "draft_tokens": 2,
    "heartbeat_s": 1.0,
    "trace_endpoint": "http://collector:4318/v1/traces",
}
FULL = ModelEntry(name="m", checkpoint="/c", device="cuda:3", options=OPTIONS_SET)


def read(entry: Path) -> Any:
    return text_format.Parse((entry / "config.pbtxt").read_text(encoding="utf-8"), pb.ModelConfig())


def test_the_committed_repository_is_what_is_written_for_the_built_in_model(tmp_path: Path) -> None:
    relative = f"../../checkpoints/{DEMO}"
    write_entry(tmp_path, model=ModelEntry(name=DEMO, checkpoint=relative))
    assert _files(tmp_path) == _files(MODELS / "repository")
    assert (MODELS / "repository" / DEMO / relative).resolve() == MODELS / "checkpoints" / DEMO


def test_the_entry_of_a_model(tmp_path: Path) -> None:
    write_entry(tmp_path, model=FULL)
    config = read(tmp_path / "m")
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 64)
    assert config.model_transaction_policy.decoupled
    for declared, names in (
        (config.input, ["prompt", "history", "sampling"]),
        (config.output, ["response", "meta"]),
    ):
        assert [(each.name, each.data_type, list(each.dims)) for each in declared] == [
            (name, pb.TYPE_STRING, [1]) for name in names
        ]
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus), group.count) == (pb.ModelInstanceGroup.KIND_CPU, [], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert "serving.model import TritonPythonModel" in (tmp_path / "m/1/model.py").read_text()


def test_requests_wait_in_no_queue_of_tritons(tmp_path: Path) -> None:
    """With a queue policy or priorities it leaves some of them waiting until the next one comes."""
    write_entry(tmp_path, model=FULL)
    config = read(tmp_path / "m")
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching == pb.ModelDynamicBatching()


def test_a_model_is_warm_before_it_is_ready(tmp_path: Path) -> None:
    """By a short greedy generation, of a prefill and a decode step."""
    write_entry(tmp_path, model=FULL)
    (warmup,) = read(tmp_path / "m").model_warmup
    raw = {
        name: (tmp_path / "m" / "warmup" / each.input_data_file).read_bytes()
        for name, each in warmup.inputs.items()
    }
    assert set(raw) == {"prompt", "history", "sampling"}
    (prompt,), (history,), (document,) = (
        unpack_strings(raw[name]) for name in ("prompt", "history", "sampling")
    )
    assert prompt.decode()
    assert decode_history(history) == []
    generation = decode_request(document)
    assert isinstance(generation, Generation)
    assert (generation.max_tokens, generation.temperature, generation.ignore_eos) == (2, 0.0, True)
    assert generation.channel is None


def test_the_model_reads_every_option_that_is_written(tmp_path: Path) -> None:
    assert OPTIONS_SET.keys() == {option.name for option in OPTIONS}
    write_entry(tmp_path, model=FULL)
    read_back = _as_the_model_reads(tmp_path / "m")
    assert read_back.options == OPTIONS_SET
    assert (read_back.model, read_back.checkpoint, read_back.device) == ("m", Path("/c"), "cuda:3")


def test_the_entry_runs_in_the_environment_that_was_named(tmp_path: Path) -> None:
    place = "$$TRITON_MODEL_DIRECTORY/../x.tar.gz"
    write_entry(tmp_path, model=ModelEntry(name="m", checkpoint="c", environment=place))
    assert read(tmp_path / "m").parameters["EXECUTION_ENV_PATH"].string_value == place


def test_only_the_checkpoint_is_written_by_default(tmp_path: Path) -> None:
    write_entry(tmp_path, model=ModelEntry(name="m", checkpoint="/c", options={"dtype": None}))
    assert set(read(tmp_path / "m").parameters) == {"checkpoint"}


@pytest.mark.parametrize("name", ["", "a b", "a/b", ".hidden", "名", "x" * 129])
def test_a_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="NAME=DIR"):
        ModelEntry(name=name, checkpoint="/c")


@pytest.mark.parametrize("device", ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:100", "auto"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="cuda:N"):
        ModelEntry(name="m", checkpoint="/c", device=device)


def _as_the_model_reads(entry: Path) -> EntryParameters:
    parameters = {key: {"string_value": p.string_value} for key, p in read(entry).parameters.items()}
    return read_parameters(
        {
            "model_config": json.dumps({"parameters": parameters}),
            "model_repository": str(entry),
            "model_name": entry.name,
            "model_version": "1",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
