"""A repository entry's parameters, as `config.pbtxt` gives them."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_models.errors import EntryError
from wire import names

_VERSION = "{version}"

TRITONS_OWN = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryParameters:
    """What an entry is configured to serve. Only `checkpoint` must be given; None: a default applies."""

    model: str
    """The served model's name: the entry's without its suffix."""
    checkpoint: Path
    device: str
    """`cpu` or `cuda:N`: where the entry's instance_group put this instance."""
    version: int = 1
    """The entry's version: the name of the folder that holds `model.py`."""
    own_version: bool = False
    """Whether the checkpoint belongs to this version: the parameter contained `{version}`."""
    format: str | None = None
    dtype: str = "auto"
    max_context: int | None = None
    kv_memory_gib: float | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    max_batched_tokens: int | None = None
    burst_tokens: int | None = None
    burst_steps: int | None = None
    heartbeat_s: float = 2.0
    """Longest silence of a running request, at most 10: clients take a longer one for a dead engine."""
    trace_endpoint: str | None = None
    """URL of an OTLP/HTTP collector, for spans of the requests that Triton traces; None: no spans."""
    contract: str | None = None
    """The contract of an entry `M`; None: the default for its checkpoint."""


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "checkpoint": Path,
    "format": str,
    "dtype": str,
    "max_context": int,
    "kv_memory_gib": float,
    "max_running": int,
    "max_waiting": int,
    "max_batched_tokens": int,
    "burst_tokens": int,
    "burst_steps": int,
    "heartbeat_s": float,
    "trace_endpoint": str,
    "contract": str,
}

_MOST: dict[str, float] = {"kv_memory_gib": 2**20, "heartbeat_s": 10}
"""The largest value of each parameter that need not be a whole number."""


def read_parameters(args: dict[str, str]) -> EntryParameters:
    """Read what Triton passes to `initialize`.

    A relative `checkpoint` is relative to the entry's own folder. `{version}` in it stands for the version
    that is loaded, so that each version of an entry can have a checkpoint of its own.

    Raises:
        EntryError: an unknown parameter, a value of the wrong type or out of range, or no checkpoint.
    """
    declared = json.loads(args["model_config"]).get("parameters", {})
    values: dict[str, Any] = {}
    for key, value in declared.items():
        if key in TRITONS_OWN:
            continue
        if key not in _CONVERTERS:
            raise EntryError(
                f"config.pbtxt has an unknown parameter {key!r}; known: {', '.join(_CONVERTERS)}"
            )
        text = value["string_value"]
        if not text:
            continue
        try:
            values[key] = _CONVERTERS[key](text)
        except ValueError as error:
            raise EntryError(f"config.pbtxt parameter {key!r}: {text!r} is not a number") from error
        if isinstance(values[key], float) and not 0 < values[key] <= _MOST[key]:  # nan is not, either
            raise EntryError(
                f"config.pbtxt parameter {key!r} must be over 0 and at most {_MOST[key]:,}, not {text}"
            )
    if "checkpoint" not in values:
        raise EntryError("config.pbtxt needs the parameter 'checkpoint': the directory of the model")
    version = args["model_version"]
    asked = str(values.pop("checkpoint"))
    checkpoint = Path(args["model_repository"]) / asked.replace(_VERSION, version)
    return EntryParameters(
        model=_served_name(args["model_name"]),
        checkpoint=Path(os.path.normpath(checkpoint)),
        version=int(version),
        own_version=_VERSION in asked,
        device=_device(args),
        **values,
    )


def _served_name(entry: str) -> str:
    for suffix in (names.STREAM_SUFFIX, names.TOKENIZER_SUFFIX):
        if entry.endswith(suffix):
            return entry.removesuffix(suffix)
    return entry


def _device(args: dict[str, str]) -> str:
    if args["model_instance_kind"] == "GPU":
        return f"cuda:{args['model_instance_device_id']}"
    return "cpu"
