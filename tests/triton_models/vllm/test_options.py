import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triton_models.errors import CheckpointError, EntryError
from triton_models.vllm.options import Options, read_options


def read(
    folder: Path, engine: Any, *, kind: str = "MODEL", adapters: Any = None, **parameters: str
) -> Options:
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "model.json").write_text(engine if isinstance(engine, str) else json.dumps(engine))
    if adapters is not None:
        (folder / "1" / "multi_lora.json").write_text(json.dumps(adapters))
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    return read_options(
        {
            "model_config": json.dumps(config),
            "model_repository": str(folder),
            "model_version": "1",
            "model_name": "llama",
            "model_instance_kind": kind,
            "model_instance_device_id": "3",
        }
    )


def test_the_repository_may_have_any_name(tmp_path: Path) -> None:
    """Also where Python takes names of files for ASCII, as in Triton's stub, whatever the locale is."""
    folder = tmp_path / "模型"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.json").write_text('{"model": "x"}')
    code = (
        "import json, sys\n"
        "from triton_models.vllm.options import read_options\n"
        "assert sys.getfilesystemencoding() == 'ascii'\n"
        "print(read_options(json.load(sys.stdin)).engine['model'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(
            {
                "model_config": "{}",
                "model_repository": str(folder),
                "model_version": "1",
                "model_name": "llama",
            }
        ).encode(),
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert said.stdout == b"x\n"


def test_truth_may_be_written_as_text(tmp_path: Path) -> None:
    options = read(tmp_path, {"model": "x", "enforce_eager": "true", "enable_prefix_caching": "False"})
    assert options.engine == {"model": "x", "enforce_eager": True, "enable_prefix_caching": False}
    assert (options.devices, options.adapters, options.health_check, options.metrics) == (
        None,
        {},
        False,
        False,
    )


def test_an_older_sample_of_the_official_backend_works_as_it_is(tmp_path: Path) -> None:
    sample = {"model": "facebook/opt-125m", "disable_log_requests": "true", "enforce_eager": "true"}
    assert read(tmp_path, sample).engine == {"model": "facebook/opt-125m", "enforce_eager": True}
    assert read(tmp_path, {"disable_log_requests": False}).engine == {"enable_log_requests": True}


def test_adapters_are_read_where_they_are_enabled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"multi_lora\.json"):
        read(tmp_path, {"enable_lora": "true"})
    assert read(tmp_path, {"enable_lora": True}, adapters={"a": "/a"}).adapters == {"a": "/a"}
    assert read(tmp_path, {"enable_lora": "false"}).adapters == {}


def test_an_instance_of_one_gpu_sees_the_one_that_triton_chose(tmp_path: Path) -> None:
    assert read(tmp_path, {}, kind="GPU").devices == "3"
    with pytest.raises(EntryError, match="KIND_MODEL"):
        read(tmp_path, {"tensor_parallel_size": 2}, kind="GPU")
    with pytest.raises(EntryError, match="KIND_MODEL"):
        read(tmp_path, {}, kind="GPU", GPU_DEVICE_IDS="0")


def test_an_instance_of_several_gpus_may_name_them(tmp_path: Path) -> None:
    assert read(tmp_path, {"tensor_parallel_size": 2}, GPU_DEVICE_IDS="2, 3").devices == "2,3"


def test_metrics_need_vllms_own(tmp_path: Path) -> None:
    switches = {"REPORT_CUSTOM_METRICS": "True", "ENABLE_VLLM_HEALTH_CHECK": "true"}
    options = read(tmp_path, {}, **switches)
    assert options.metrics
    assert options.health_check
    assert not read(tmp_path, {"disable_log_stats": True}, **switches).metrics


@pytest.mark.parametrize("document", ["{", "[]"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, document: str) -> None:
    with pytest.raises(CheckpointError, match=r"model\.json: not"):
        read(tmp_path, document)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    read(tmp_path, {})
    (tmp_path / "1" / "model.json").unlink()
    arguments = {"model_config": "{}", "model_repository": str(tmp_path), "model_version": "1"}
    with pytest.raises(CheckpointError, match=r"model\.json: No such file"):
        read_options(arguments)
