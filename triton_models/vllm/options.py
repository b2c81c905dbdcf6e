"""What a repository entry says about its engine: `model.json`, `multi_lora.json` and parameters of the entry.

The files and names are those of Triton's official vLLM backend, so that its repositories work as they are.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triton_models.directory import read_json
from triton_models.errors import EntryError

ENGINE_FILE: Final = "model.json"
ADAPTERS_FILE: Final = "multi_lora.json"

_TRUTHS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """An entry's options.

    Attributes:
        model: the entry's name.
        version: its number, as Triton writes it.
        engine: arguments of vLLM's AsyncEngineArgs by their names.
        adapters: folders of LoRA adapters by their names.
        devices: for CUDA_VISIBLE_DEVICES; None: as it is.
        health_check: whether the entry is unloaded when its engine has died.
        metrics: whether vLLM's metrics go to Triton's.
    """

    model: str
    version: str
    engine: Mapping[str, Any]
    adapters: Mapping[str, str]
    devices: str | None
    health_check: bool
    metrics: bool


def read_options(args: Mapping[str, str]) -> Options:
    """Read what Triton passed to `initialize`, and the files beside it.

    Raises:
        CheckpointError: a file is missing or no JSON object.
        EntryError: values contradict each other.
    """
    config = json.loads(args["model_config"])
    given = {name: each["string_value"].strip() for name, each in (config.get("parameters") or {}).items()}
    # In Triton's stub, Python takes names of files for ASCII, whatever the locale: it needs their bytes.
    folder = Path(os.fsdecode(args["model_repository"].encode())) / args["model_version"]
    engine = {
        # The official backend's own examples write "true"; for vLLM, any text would be true.
        name: _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value
        for name, value in read_json(folder / ENGINE_FILE).items()
    }
    # The official samples had it until vLLM left it out, with 0.10.1, and turned its meaning around.
    if engine.pop("disable_log_requests", True) is False:
        engine["enable_log_requests"] = True
    adapters = read_json(folder / ADAPTERS_FILE) if engine.get("enable_lora") else {}
    return Options(
        model=args["model_name"],
        version=args["model_version"],
        engine=engine,
        adapters={name: str(path) for name, path in adapters.items()},
        devices=_devices(args, given.get("GPU_DEVICE_IDS", ""), engine),
        health_check=given.get("ENABLE_VLLM_HEALTH_CHECK", "").lower() == "true",
        metrics=given.get("REPORT_CUSTOM_METRICS", "").lower() == "true"
        and not engine.get("disable_log_stats"),
    )


def _devices(args: Mapping[str, str], wanted: str, engine: Mapping[str, Any]) -> str | None:
    """Return the GPUs that the engine may see.

    A KIND_GPU instance gets the one that Triton chose, and vLLM would take the first of all.
    """
    if args.get("model_instance_kind") != "GPU":
        return wanted.replace(" ", "") or None
    if int(engine.get("tensor_parallel_size", 1)) * int(engine.get("pipeline_parallel_size", 1)) > 1:
        raise EntryError(
            "an instance of KIND_GPU has one GPU: for tensor or pipeline parallelism write "
            "instance_group [ { kind: KIND_MODEL } ], and the GPUs into the parameter GPU_DEVICE_IDS"
        )
    if wanted:
        raise EntryError("GPU_DEVICE_IDS is for instances of KIND_MODEL; KIND_GPU has `gpus`")
    return args["model_instance_device_id"]
