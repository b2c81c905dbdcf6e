import json
from pathlib import Path
from typing import Any

import pytest

from triton_models.errors import EntryError
from triton_models.serving.parameters import read_parameters


def triton_args(parameters: dict[str, str], **others: str) -> dict[str, str]:
    config: dict[str, Any] = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()}
    }
    return {
        "model_config": json.dumps(config),
        "model_name": "glm-stream",
        "model_repository": "/models/glm-stream",
        "model_version": "3",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    } | others


def test_only_the_checkpoint_is_needed() -> None:
    parameters = read_parameters(triton_args({"checkpoint": "/weights/glm"}))
    assert parameters.checkpoint == Path("/weights/glm")
    assert parameters.model == "glm"
    assert parameters.device == "cpu"
    assert parameters.max_running is None


def test_a_relative_checkpoint_is_relative_to_the_entry() -> None:
    parameters = read_parameters(triton_args({"checkpoint": "../../weights"}))
    assert parameters.checkpoint == Path("/weights")


def test_a_version_can_have_a_checkpoint_of_its_own() -> None:
    shared = read_parameters(triton_args({"checkpoint": "/weights/glm"}))
    own = read_parameters(triton_args({"checkpoint": "/weights/{version}/glm"}))
    assert (shared.version, shared.own_version) == (3, False)
    assert (own.version, own.own_version, own.checkpoint) == (3, True, Path("/weights/3/glm"))


def test_the_instance_group_chooses_the_device() -> None:
    arguments = triton_args({"checkpoint": "x"}, model_instance_kind="GPU", model_instance_device_id="3")
    assert read_parameters(arguments).device == "cuda:3"


def test_tritons_own_parameters_are_left_alone() -> None:
    read_parameters(triton_args({"checkpoint": "x", "EXECUTION_ENV_PATH": "/e.tar.gz"}))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "checkpoint"),
        ({"checkpoint": ""}, "checkpoint"),
        ({"checkpoint": "x", "max_contxt": "5"}, "max_contxt"),
        ({"checkpoint": "x", "max_context": "many"}, "max_context"),
        ({"checkpoint": "x", "kv_memory_gib": "1,5"}, "kv_memory_gib"),
        *(
            ({"checkpoint": "x", name: value}, f"{name}' must be over 0 and at most .*, not {value}")
            for name in ("kv_memory_gib", "heartbeat_s")
            for value in ("nan", "inf", "-inf", "0", "-2", "1e9")
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(parameters: dict[str, str], words: str) -> None:
    with pytest.raises(EntryError, match=words):
        read_parameters(triton_args(parameters))
