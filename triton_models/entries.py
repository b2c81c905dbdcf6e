"""Writes the repository entry of a model: what Triton needs on disk to serve it.

This module knows Triton's configuration language; it does not open the checkpoint.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from triton_models.options import DEVICE
from triton_models.signature import DATA_TYPE, INPUTS, MAX_BATCH_SIZE, OUTPUTS
from wire import history, names, strings
from wire.options import Value
from wire.request import Generation, encode_request

_HEADER: Final = "# Written by triton_models/entries.py. Only the parameter `checkpoint` is required.\n"
_MODEL_PY: Final = """from triton_models.serving.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_WARMUP_FOLDER: Final = "warmup"
"""Where Triton looks for a warm-up's `input_data_file`, inside the entry."""

_WARMUP: Final = {
    names.PROMPT: "你好".encode(),
    names.HISTORY: history.encode_history([]),
    # Two tokens: one from the prefill, one from a decode step. Greedy, and no stop id ends it early.
    names.SAMPLING: encode_request(
        Generation(request_id="warmup", raw=True, max_tokens=2, temperature=0.0, ignore_eos=True)
    ),
}
"""The tensors of the warm-up: one short generation. Triton runs it before it reports the model as READY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model to be served.

    Raises:
        ValueError: the name cannot be used as a folder name and URL segment, or the device is neither `cpu`
            nor `cuda:N`.
    """

    name: str
    checkpoint: str
    """A directory; a relative one is relative to the entry's own folder."""
    device: str = "cpu"
    """`cpu` or `cuda:N`. Only the model is told of a GPU: an entry that names it to Triton, by KIND_GPU, has
    tritonserver make a CUDA context of its own there."""
    environment: str | None = None
    """The archive or folder of the Python environment in which the stub runs (see environment.py); None: the
    server's own. `$$TRITON_MODEL_DIRECTORY` in the path stands for the entry's folder."""
    options: Mapping[str, Value | None] = field(default_factory=dict)
    """By name (`wire.options.OPTIONS`), with values that fit; absent ones and None are left to the engine."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} cannot be a model's name, made of letters, digits, '.', '_' and '-': "
                "write NAME=DIR to choose one"
            )
        if not DEVICE.fullmatch(self.device):
            raise ValueError(f"{self.device!r} is not a device: cpu or cuda:N")


def write_entry(repository: Path, *, model: ModelEntry) -> None:
    """Create the model's entry in `repository`, overwriting files of the same name.

    Raises:
        OSError: the repository cannot be written.
    """
    entry = repository / model.name
    for folder in ("1", _WARMUP_FOLDER):
        (entry / folder).mkdir(parents=True, exist_ok=True)
    text = _HEADER + text_format.MessageToString(entry_config(model), as_utf8=True)
    (entry / "config.pbtxt").write_text(text, encoding="utf-8")
    (entry / "1" / "model.py").write_text(_MODEL_PY, encoding="utf-8")
    for name, value in _WARMUP.items():
        (entry / _WARMUP_FOLDER / name).write_bytes(strings.pack_strings([value]))


def entry_config(model: ModelEntry) -> Any:
    """Return the entry's `ModelConfig` message."""
    data_type = pb.DataType.Value(DATA_TYPE)
    config = pb.ModelConfig(
        name=model.name,
        backend="python",
        max_batch_size=MAX_BATCH_SIZE,
        input=[pb.ModelInput(name=name, data_type=data_type, dims=[1]) for name in INPUTS],
        output=[pb.ModelOutput(name=name, data_type=data_type, dims=[1]) for name in OUTPUTS],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        # No delay, queue policy or priorities: see `signature.complete`.
        dynamic_batching=pb.ModelDynamicBatching(),
        model_warmup=[
            pb.ModelWarmup(
                name="short generation",
                batch_size=1,
                inputs={
                    name: pb.ModelWarmup.Input(data_type=data_type, dims=[1], input_data_file=name)
                    for name in INPUTS
                },
            )
        ],
    )
    others = {
        "checkpoint": model.checkpoint,
        "device": None if model.device == "cpu" else model.device,
        "EXECUTION_ENV_PATH": model.environment,
    }
    for key, value in {**others, **model.options}.items():
        if value is not None:
            config.parameters[key].string_value = str(value)
    return config
