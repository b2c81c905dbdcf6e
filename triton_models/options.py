"""Reads an entry's parameters in `config.pbtxt`: its options (`wire.options`), checkpoint and device.

Imports no torch: programs that write entries must run without the engine.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triton_models.errors import EntryError
from wire.options import OPTIONS, Value

Options = Mapping[str, Any]
"""Values by option name: those that were set, each of its option's kind."""

_VERSION: Final = "{version}"

TRITONS_OWN: Final = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
"""Parameters that Triton's Python backend reads."""

DEVICE: Final = re.compile(r"cpu|cuda:[0-9]{1,2}")
"""Where a model can compute."""

_BY_NAME: Final = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryParameters:
    """What an entry is configured to serve."""

    model: str
    """The served model's name, which is the entry's."""
    checkpoint: Path
    device: str
    """`cpu` or `cuda:N`."""
    version: int
    """The entry's version: the name of the folder that holds `model.py`."""
    options: Options
    """The options that are set."""


def read_parameters(args: Mapping[str, str]) -> EntryParameters:
    """Read what Triton passes to `initialize`.

    A relative `checkpoint` is relative to the entry's own folder. `{version}` in it stands for the version
    that is loaded, so that each version of an entry can have a checkpoint of its own. Without the parameter
    `device`, the model computes where the entry's instance_group put this instance.

    Raises:
        EntryError: an unknown parameter, a value of the wrong type or out of range, no checkpoint, or two
            devices.
    """
    declared = json.loads(args["model_config"]).get("parameters", {})
    texts = {key: value["string_value"] for key, value in declared.items() if key not in TRITONS_OWN}
    checkpoint = texts.pop("checkpoint", "")
    device = _read_device(texts.pop("device", ""), args)
    options: dict[str, Value] = {}
    for name, text in texts.items():
        if name not in _BY_NAME:
            known = ", ".join(("checkpoint", "device", *_BY_NAME))
            raise EntryError(f"config.pbtxt has an unknown parameter {name!r}; known: {known}")
        if not text:
            continue
        try:
            options[name] = _BY_NAME[name].parse(text)
        except ValueError as error:
            raise EntryError(f"config.pbtxt, parameter {error}") from None
    if not checkpoint:
        raise EntryError("config.pbtxt needs the parameter 'checkpoint': the directory of the model")
    version = args["model_version"]
    path = Path(args["model_repository"]) / checkpoint.replace(_VERSION, version)
    return EntryParameters(
        model=args["model_name"],
        # In Triton's stub, Python takes names of files for ASCII, whatever the locale: it needs their bytes.
        checkpoint=Path(os.fsdecode(os.path.normpath(path).encode())),
        version=int(version),
        device=device,
        options=options,
    )


def _read_device(text: str, args: Mapping[str, str]) -> str:
    on_gpu = args["model_instance_kind"] == "GPU"
    if not text:
        return f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
    if not DEVICE.fullmatch(text):
        raise EntryError(f"config.pbtxt, parameter device: {text!r} is neither cpu nor cuda:N")
    if on_gpu:
        raise EntryError(
            "config.pbtxt, parameter device is for instances of KIND_CPU; "
            "without it, an instance of KIND_GPU computes on the GPU that Triton chose"
        )
    return text
