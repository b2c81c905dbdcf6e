"""Writes the repository entries of a model: what Triton needs on disk to serve it.

A model `M` has three entries: `M-stream` (the engine), `M-tokenizer`, and `M` itself (request/response, which
calls `M-stream`). This module knows Triton's configuration language; it does not open the checkpoint.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from triton_models import signatures, warmup
from triton_models.signatures import Contract, Signature, choose_contract, field_signature
from wire import names

_HEADER = "# Written by triton_models/entries.py. Only the parameter `checkpoint` is required.\n"
_MODEL_PY = """from triton_models.serving.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DEVICE = re.compile(r"cpu|cuda:([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model to be served. Values that are None are left out of `config.pbtxt`, and the engine chooses them.

    Raises:
        ValueError: the name cannot be used as a folder name and URL segment, or the device is neither `cpu`
            nor `cuda:N`.
    """

    name: str
    checkpoint: str
    """A directory; a relative one is relative to the entry's own folder."""
    device: str = "cpu"
    """`cpu` or `cuda:N`; decides the entry's instance group."""

    format: str | None = None
    """The chat format, `chatglm2`, `chatglm3` or `glm4`; None: it is determined from the checkpoint."""
    dtype: str | None = None
    max_context: int | None = None
    """Prompt and answer together, in tokens."""
    kv_memory_gib: float | None = None
    max_running: int | None = None
    """Sequences in one engine step."""
    max_waiting: int | None = None
    """Requests in the engine's waiting list; more are refused."""
    max_batched_tokens: int | None = None
    """Tokens in one engine step, prefill and decode together."""
    burst_tokens: int | None = None
    """Tokens in one engine step while enough prompts are waiting to fill it."""
    burst_steps: int | None = None
    """Number of consecutive steps that may leave out decodes to prefill a burst of prompts."""
    heartbeat_s: float | None = None
    trace_endpoint: str | None = None
    """URL to which the model sends its own spans by OTLP/HTTP; tracing must be on in Triton, too."""
    environment: str | None = None
    """The archive or folder of the Python environment in which the stubs run (see environment.py); None: the
    server's own. `$$TRITON_MODEL_DIRECTORY` in the path stands for the entry's folder."""
    contract: Contract | None = None
    """The contract of `M`; None: the default for `format`, or `batched` if that is None, too."""

    max_queue_size: int = 1024
    """Requests in Triton's own queue for the engine, per priority level. Only bursts wait there, since
    `execute` never blocks."""
    queue_timeout_s: float = 60.0
    """How long a request may wait in that queue, unless it sets its own timeout."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} cannot be a model's name, made of letters, digits, '.', '_' and '-': "
                "write NAME=DIR to choose one"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"{self.device!r} is not a device: cpu or cuda:N")


_ENGINE_PARAMETERS = frozenset(field.name for field in fields(ModelEntry)) - {
    "name",
    "checkpoint",
    "device",
    "format",
    "contract",
    "environment",
    "max_queue_size",
    "queue_timeout_s",
}


def write_entries(repository: Path, *, model: ModelEntry) -> None:
    """Create `M-stream`, `M-tokenizer` and `M` in `repository`, overwriting files of the same name.

    Raises:
        OSError: the repository cannot be written.
    """
    stream = repository / names.stream_entry(model.name)
    _write_entry(stream, stream_config(model), module="stream")
    warmup.write_warmup(stream, warmup.stream_tensors())
    tokenizer = repository / names.tokenizer_entry(model.name)
    _write_entry(tokenizer, tokenizer_config(model), module="tokenizer")
    field = repository / model.name
    contract = choose_contract(model.contract, model.format)
    _write_entry(field, field_config(model, contract), module="field")


def stream_config(model: ModelEntry) -> Any:
    """Return the `ModelConfig` message of `M-stream`: decoupled, batched, and with a warm-up."""
    config = _config(names.stream_entry(model.name), signatures.STREAM, model.device)
    config.dynamic_batching.CopyFrom(_batching(model))
    config.model_warmup.append(_warmup(signatures.STREAM, warmup.stream_tensors()))
    values = {name: getattr(model, name) for name in sorted(_ENGINE_PARAMETERS)}
    _set_parameters(config, _common_parameters(model) | values)
    return config


def tokenizer_config(model: ModelEntry) -> Any:
    """Return the `ModelConfig` message of `M-tokenizer`: one response per request, on the CPU."""
    config = _config(names.tokenizer_entry(model.name), signatures.TOKENIZER, "cpu")
    config.dynamic_batching.SetInParent()  # without a policy: see `_batching`
    _set_parameters(config, _common_parameters(model))
    return config


def field_config(model: ModelEntry, contract: Contract) -> Any:
    """Return the `ModelConfig` message of `M`: one response per request, however long it takes.

    It has no warm-up: `M-stream` warms the engine, and a warm-up that calls `M-stream` fails on a server that
    loads its whole repository at start (2.51).
    """
    config = _config(model.name, field_signature(contract), "cpu")
    config.dynamic_batching.SetInParent()  # without a policy: see `_batching`
    _set_parameters(config, _common_parameters(model) | {"contract": contract})
    return config


def _write_entry(entry: Path, config: Any, *, module: str) -> None:
    (entry / "1").mkdir(parents=True, exist_ok=True)
    text = _HEADER + text_format.MessageToString(config, as_utf8=True)
    (entry / "config.pbtxt").write_text(text, encoding="utf-8")
    (entry / "1" / "model.py").write_text(_MODEL_PY.format(module=module), encoding="utf-8")


def _config(name: str, signature: Signature, device: str) -> Any:
    return pb.ModelConfig(
        name=name,
        backend="python",
        max_batch_size=signature.max_batch_size,
        input=[
            pb.ModelInput(
                name=each.name,
                data_type=pb.DataType.Value(each.data_type),
                dims=[each.size],
                optional=each.optional,
            )
            for each in signature.inputs
        ],
        output=[
            pb.ModelOutput(name=each.name, data_type=pb.DataType.Value(each.data_type), dims=[each.size])
            for each in signature.outputs
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True) if signature.decoupled else None,
        instance_group=[_instance_group(device)],
    )


def _batching(model: ModelEntry) -> Any:
    """Return how requests to the engine wait and are batched: without delay, since it forms its own batches.

    Triton forgets requests in a queue with a policy or priorities, for half a second (ARCHITECTURE.md,
    "Requests that Triton forgets"). So the other entries have neither, and bound what they took themselves.
    """
    policy = pb.ModelQueuePolicy(
        timeout_action=pb.ModelQueuePolicy.REJECT,
        default_timeout_microseconds=round(model.queue_timeout_s * 1e6),
        allow_timeout_override=True,
        max_queue_size=model.max_queue_size,
    )
    return pb.ModelDynamicBatching(
        max_queue_delay_microseconds=0,
        default_queue_policy=policy,
        priority_levels=names.PRIORITY_LEVELS,
        default_priority_level=names.DEFAULT_PRIORITY,
    )


def _instance_group(device: str) -> Any:
    found = _DEVICE.fullmatch(device)
    if found is None or found[1] is None:
        return pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    return pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_GPU, count=1, gpus=[int(found[1])])


def _warmup(signature: Signature, tensors: dict[str, bytes]) -> Any:
    inputs = {
        each.name: pb.ModelWarmup.Input(
            # A tensor of any size is an empty one here.
            data_type=pb.DataType.Value(each.data_type),
            dims=[max(each.size, 0)],
            input_data_file=each.name,
        )
        for each in signature.inputs
        if each.name in tensors
    }
    return pb.ModelWarmup(name="short generation", batch_size=1, inputs=inputs)


def _common_parameters(model: ModelEntry) -> dict[str, object]:
    return {"checkpoint": model.checkpoint, "format": model.format, "EXECUTION_ENV_PATH": model.environment}


def _set_parameters(config: Any, values: dict[str, object]) -> None:
    for key, value in values.items():
        if value is not None:
            config.parameters[key].string_value = str(value)
