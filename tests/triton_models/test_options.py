import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from triton_models.engine.settings import EngineSettings
from triton_models.errors import EntryError
from triton_models.options import read_parameters
from wire.options import OPTIONS

BY_NAME = {option.name: option for option in OPTIONS}


def triton_args(parameters: dict[str, str], **others: str) -> dict[str, str]:
    config: dict[str, Any] = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()}
    }
    return {
        "model_config": json.dumps(config),
        "model_name": "glm",
        "model_repository": "/models/glm",
        "model_version": "3",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    } | others


def test_only_the_checkpoint_is_needed() -> None:
    parameters = read_parameters(triton_args({"checkpoint": "/weights/glm"}))
    assert parameters.checkpoint == Path("/weights/glm")
    assert (parameters.model, parameters.device, parameters.version) == ("glm", "cpu", 3)
    assert parameters.options == {}


def test_options_have_their_kind_and_empty_ones_are_not_set() -> None:
    texts = {"max_context": "4096", "kv_memory_gib": "1.5", "dtype": "bfloat16", "format": ""}
    parameters = read_parameters(triton_args({"checkpoint": "x", **texts}))
    assert parameters.options == {"max_context": 4096, "kv_memory_gib": 1.5, "dtype": "bfloat16"}


def test_a_relative_checkpoint_is_relative_to_the_entry() -> None:
    parameters = read_parameters(triton_args({"checkpoint": "../../weights"}))
    assert parameters.checkpoint == Path("/weights")


def test_a_checkpoints_folder_may_have_any_name(tmp_path: Path) -> None:
    """Also where Python takes names of files for ASCII, as in Triton's stub, whatever the locale is."""
    folder = tmp_path / "模型"
    folder.mkdir()
    (folder / "config.json").write_text("[]")
    code = (
        "import json, sys\n"
        "from triton_models.directory import read_json\n"
        "from triton_models.options import read_parameters\n"
        "assert sys.getfilesystemencoding() == 'ascii'\n"
        "try:\n"
        "    read_json(read_parameters(json.load(sys.stdin)).checkpoint / 'config.json')\n"
        "except Exception as error:\n"
        "    sys.stdout.buffer.write(str(error).encode())"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(triton_args({"checkpoint": str(folder)})).encode(),
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert said.stdout.decode() == f"{folder}/config.json: not a JSON object"


def test_a_version_can_have_a_checkpoint_of_its_own() -> None:
    parameters = read_parameters(triton_args({"checkpoint": "/weights/{version}/glm"}))
    assert parameters.checkpoint == Path("/weights/3/glm")


def test_the_instance_group_chooses_the_device() -> None:
    arguments = triton_args({"checkpoint": "x"}, model_instance_kind="GPU", model_instance_device_id="3")
    assert read_parameters(arguments).device == "cuda:3"


@pytest.mark.parametrize("kind", ["CPU", "MODEL"])
def test_the_parameter_chooses_the_device_where_triton_does_not(kind: str) -> None:
    arguments = triton_args({"checkpoint": "x", "device": "cuda:1"}, model_instance_kind=kind)
    assert read_parameters(arguments).device == "cuda:1"
    assert read_parameters(arguments).options == {}
    assert read_parameters(triton_args({"checkpoint": "x", "device": ""})).device == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_second_device_is_refused(device: str) -> None:
    arguments = triton_args({"checkpoint": "x", "device": device}, model_instance_kind="GPU")
    with pytest.raises(EntryError, match="device is for instances of KIND_CPU"):
        read_parameters(arguments)


def test_tritons_own_parameters_are_left_alone() -> None:
    read_parameters(triton_args({"checkpoint": "x", "EXECUTION_ENV_PATH": "/e.tar.gz"}))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "checkpoint"),
        ({"checkpoint": ""}, "checkpoint"),
        ({"checkpoint": "x", "max_contxt": "5"}, "unknown parameter 'max_contxt'; known: checkpoint, device"),
        ({"checkpoint": "x", "device": "cuda"}, "device: 'cuda' is neither cpu nor cuda:N"),
        ({"checkpoint": "x", "max_context": "many"}, "max_context: 'many' is not a whole number"),
        ({"checkpoint": "x", "max_context": "1.5"}, "max_context: '1.5' is not a whole number"),
        ({"checkpoint": "x", "max_context": "1"}, "max_context must be at least 32, not 1"),
        ({"checkpoint": "x", "max_waiting": "-1"}, "max_waiting must be at least 0, not -1"),
        ({"checkpoint": "x", "kv_memory_gib": "1,5"}, "kv_memory_gib: '1,5' is not a number"),
        ({"checkpoint": "x", "dtype": "int3"}, "dtype must be auto, float32, bfloat16 or float16, not int3"),
        *(
            ({"checkpoint": "x", name: value}, f"{name} must be over 0 and at most .*, not {float(value)}")
            for name in ("kv_memory_gib", "heartbeat_s")
            for value in ("nan", "inf", "-inf", "0", "-2", "1e9")
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(parameters: dict[str, str], words: str) -> None:
    with pytest.raises(EntryError, match=words):
        read_parameters(triton_args(parameters))


def test_the_engines_own_defaults_are_those_that_are_said() -> None:
    named = {field.name: field.default for field in fields(EngineSettings)}
    for option in OPTIONS:
        if option.kind is int and option.default.isdigit():
            assert named[option.name] == int(option.default)


def test_the_engine_has_an_option_for_each_of_its_limits() -> None:
    own = {"block_size", "kv_blocks", "failure_limit"}
    limits = {field.name for field in fields(EngineSettings)} - own
    assert limits == BY_NAME.keys() - {
        "engine", "format", "dtype", "quantization", "heartbeat_s", "trace_endpoint",
    }  # fmt: skip


def test_options_are_read_without_torch_or_click() -> None:
    """By programs that start a server in whose Python the engine is not installed."""
    program = (
        "import sys, triton_models.options; raise SystemExit(bool({'torch', 'click'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
