import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from triton_models.embedded.models import BUILT_IN_CHECKPOINT, BUILT_IN_NAME
from triton_models.entries import ModelEntry, write_entries
from triton_models.serving.parameters import read_parameters
from triton_models.signatures import Contract

COMMITTED = Path(__file__).parents[2] / "triton_models" / "repository"
FULL = ModelEntry(
    name="m",
    checkpoint="/c",
    device="cuda:3",
    format="chatglm2",
    dtype="bfloat16",
    max_context=4096,
    kv_memory_gib=1.5,
    max_running=8,
    max_waiting=16,
    max_batched_tokens=256,
    burst_tokens=512,
    burst_steps=4,
    heartbeat_s=1.0,
    max_queue_size=5,
    queue_timeout_s=0.25,
)


def read(entry: Path) -> Any:
    return text_format.Parse((entry / "config.pbtxt").read_text(encoding="utf-8"), pb.ModelConfig())


def batches_plainly(config: Any) -> bool:
    """Whether Triton batches for the entry without policy and priorities, under which it forgets requests."""
    return config.HasField("dynamic_batching") and config.dynamic_batching == pb.ModelDynamicBatching()


def test_the_committed_repository_is_what_is_written_for_the_built_in_model(tmp_path: Path) -> None:
    relative = f"../../checkpoints/{BUILT_IN_NAME}"
    write_entries(tmp_path, model=ModelEntry(name=BUILT_IN_NAME, checkpoint=relative))
    assert _files(tmp_path) == _files(COMMITTED)
    entry = COMMITTED / f"{BUILT_IN_NAME}-stream"
    assert (entry / relative).resolve() == BUILT_IN_CHECKPOINT.resolve()


def test_stream_entry(tmp_path: Path) -> None:
    write_entries(tmp_path, model=FULL)
    config = read(tmp_path / "m-stream")
    assert config.name == "m-stream"
    assert config.backend == "python"
    assert config.max_batch_size == 64
    assert config.model_transaction_policy.decoupled
    assert [(i.name, i.data_type, list(i.dims), i.optional) for i in config.input] == [
        (name, pb.TYPE_STRING, [1], False) for name in ("prompt", "history", "sampling")
    ]
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [
        (name, pb.TYPE_STRING, [1]) for name in ("response", "meta")
    ]
    batching = config.dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (2, 2)
    assert batching.max_queue_delay_microseconds == 0
    policy = batching.default_queue_policy
    assert (policy.timeout_action, policy.max_queue_size) == (pb.ModelQueuePolicy.REJECT, 5)
    assert (policy.default_timeout_microseconds, policy.allow_timeout_override) == (250_000, True)
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus), group.count) == (pb.ModelInstanceGroup.KIND_GPU, [3], 1)
    (warmup,) = config.model_warmup
    assert {name: i.input_data_file for name, i in warmup.inputs.items()} == {
        name: name for name in ("prompt", "history", "sampling")
    }
    assert "serving.stream import TritonPythonModel" in (tmp_path / "m-stream/1/model.py").read_text()


def test_tokenizer_entry(tmp_path: Path) -> None:
    write_entries(tmp_path, model=FULL)
    config = read(tmp_path / "m-tokenizer")
    assert config.max_batch_size == 0
    assert not config.model_transaction_policy.decoupled
    assert batches_plainly(config)
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [("request", pb.TYPE_STRING, [1])]
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [
        ("input_ids", pb.TYPE_INT64, [-1]),
        ("attention_mask", pb.TYPE_INT64, [-1]),
        ("text", pb.TYPE_STRING, [1]),
        ("tokens", pb.TYPE_STRING, [-1]),
    ]
    assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]
    assert {key: p.string_value for key, p in config.parameters.items()} == {
        "checkpoint": "/c",
        "format": "chatglm2",
    }


def tensors(declared: Any) -> list[tuple[str, int, list[int], bool]]:
    return [
        (each.name, each.data_type, list(each.dims), getattr(each, "optional", False)) for each in declared
    ]


def strings(*named: str, size: int = 1) -> list[tuple[str, int, list[int], bool]]:
    return [(name, pb.TYPE_STRING, [size], False) for name in named]


def test_field_entry_batched(tmp_path: Path) -> None:
    write_entries(tmp_path, model=ModelEntry(name="m", checkpoint="/c", max_queue_size=5))
    config = read(tmp_path / "m")
    assert (config.name, config.max_batch_size) == ("m", 64)
    assert not config.model_transaction_policy.decoupled
    *needed, optional = tensors(config.input)
    assert needed == strings("prompt", "history", "temperature", "max_token")
    assert optional == ("history_len", pb.TYPE_STRING, [1], True)
    assert tensors(config.output) == strings("response", "history")
    assert batches_plainly(config)
    assert {key: p.string_value for key, p in config.parameters.items()} == {
        "checkpoint": "/c",
        "contract": "batched",
    }
    assert "serving.field import TritonPythonModel" in (tmp_path / "m/1/model.py").read_text()


def test_field_entry_unbatched(tmp_path: Path) -> None:
    write_entries(tmp_path, model=ModelEntry(name="m", checkpoint="/c", contract=Contract.UNBATCHED))
    config = read(tmp_path / "m")
    assert config.max_batch_size == 0
    assert batches_plainly(config)
    assert tensors(config.input) == [
        *strings("prompt", "history", "temperature"),
        ("max_token", pb.TYPE_INT16, [1], False),
        ("history_len", pb.TYPE_INT16, [1], False),
    ]
    assert tensors(config.output) == strings("response", "history")


def test_field_entry_of_chatglm2(tmp_path: Path) -> None:
    write_entries(tmp_path, model=FULL)
    config = read(tmp_path / "m")
    assert config.max_batch_size == 0
    assert tensors(config.input) == [
        *strings("prompt"),
        *strings("history", size=-1),
        *strings("temperature", "max_token", "history_len"),
    ]
    assert tensors(config.output) == [*strings("response"), *strings("history", size=-1)]
    assert config.parameters["contract"].string_value == "chatglm2"
    assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]


def test_the_field_entry_asks_nothing_of_another_while_the_server_loads(tmp_path: Path) -> None:
    write_entries(tmp_path, model=ModelEntry(name="m", checkpoint="/c"))
    assert not read(tmp_path / "m").model_warmup
    assert not (tmp_path / "m" / "warmup").exists()


def test_the_model_reads_every_parameter_that_is_written(tmp_path: Path) -> None:
    write_entries(tmp_path, model=FULL)
    read_back = _as_the_model_reads(tmp_path / "m-stream")
    for name in ("dtype", "max_context", "kv_memory_gib", "max_running", "max_waiting", "format"):
        assert getattr(read_back, name) == getattr(FULL, name)
    assert (read_back.max_batched_tokens, read_back.burst_tokens, read_back.burst_steps) == (256, 512, 4)
    assert read_back.heartbeat_s == 1.0
    assert (read_back.model, read_back.checkpoint) == ("m", Path("/c"))


def test_every_entry_runs_in_the_environment_that_was_named(tmp_path: Path) -> None:
    place = "$$TRITON_MODEL_DIRECTORY/../x.tar.gz"
    write_entries(tmp_path, model=ModelEntry(name="m", checkpoint="c", environment=place))
    for name in ("m", "m-stream", "m-tokenizer"):
        assert read(tmp_path / name).parameters["EXECUTION_ENV_PATH"].string_value == place


def test_only_the_checkpoint_is_written_by_default(tmp_path: Path) -> None:
    write_entries(tmp_path, model=ModelEntry(name="m", checkpoint="/c"))
    assert set(read(tmp_path / "m-stream").parameters) == {"checkpoint"}


@pytest.mark.parametrize("name", ["", "a b", "a/b", ".hidden", "名", "x" * 129])
def test_a_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="NAME=DIR"):
        ModelEntry(name=name, checkpoint="/c")


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:", "cuda:-1", "auto"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="cuda:N"):
        ModelEntry(name="m", checkpoint="/c", device=device)


def _as_the_model_reads(entry: Path) -> Any:
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
