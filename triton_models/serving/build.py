"""Builds a stream entry's service from its parameters."""

import gc
import logging
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from triton_models.checkpoint import load_model, progress_bar
from triton_models.engine.engine import Engine
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.errors import CheckpointError, EntryError
from triton_models.serving.chat_text import load_text
from triton_models.serving.metrics import EngineMetrics
from triton_models.serving.parameters import EntryParameters
from triton_models.serving.service import StreamService

if TYPE_CHECKING:
    from triton_models.serving.spans import ModelSpans

log = logging.getLogger(__name__)

_SWITCH_S: Final = 0.0005
"""Seconds after which a running thread must offer the interpreter lock to others; set only with a GPU."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ENGINE_PARAMETERS: Final = (
    "max_context",
    "kv_memory_gib",
    "max_running",
    "max_waiting",
    "max_batched_tokens",
    "burst_tokens",
    "burst_steps",
)

_GPU_DEFAULTS: Final = {
    "max_running": 512,
    "max_batched_tokens": 1024,
    "burst_tokens": 4096,
    "burst_steps": 4,
}
"""A GPU computes many tokens in the time it takes to read the weights once. With four times as many prompt
tokens in a step, each takes 7 % less time, but the decodes in it stall four times as long (bench/LOG.md):
worth it only while many prompts wait."""


def build_service(parameters: EntryParameters, pb_utils: Any) -> StreamService:
    """Load the checkpoint and build the engine; nothing runs yet.

    Raises:
        ModelError: the checkpoint cannot be served as configured.
    """
    # Text first: it takes milliseconds, and so fails before gigabytes are read.
    text = load_text(parameters)
    text.grammars.prepare()  # or the first request with a grammar would wait for it
    spans = make_spans(parameters)
    device = torch.device(parameters.device)
    dtype, reason = choose_dtype(parameters.dtype, device)
    log.info("%s: %s on %s: %s", parameters.model, dtype, device, reason)
    with progress_bar(parameters.model) as progress:
        model = load_model(parameters.checkpoint, dtype, device, progress)
    if text.tokenizer.size > model.vocab_size:
        raise CheckpointError(
            f"{parameters.checkpoint}: the tokenizer has {text.tokenizer.size} ids and the weights have"
            f" {model.vocab_size}: they do not belong together"
        )
    settings = engine_settings(parameters, device)
    metrics = EngineMetrics(parameters.model, parameters.version, pb_utils)
    engine = Engine(model, settings)
    if device.type == "cuda":
        # Kernels are compiled and libraries loaded at their first use, which must not be a client's request.
        warm_up(engine)
        # A full garbage collection that visits torch's objects, which live forever, takes over 100 ms.
        gc.collect()
        gc.freeze()
        # Nearly every torch call releases the interpreter lock. While another thread reads the requests of a
        # burst, the engine's thread gets the lock back only after this interval: 5 ms by default, and a step
        # takes 4 ms.
        sys.setswitchinterval(_SWITCH_S)
    return StreamService(engine, text, metrics, heartbeat_s=parameters.heartbeat_s, spans=spans)


def make_spans(parameters: EntryParameters) -> "ModelSpans | None":
    """Return the sender of the model's own spans; None if the entry does not ask for them.

    Raises:
        EntryError: the extra `tracing` is not installed.
    """
    if parameters.trace_endpoint is None:
        return None
    try:
        from triton_models.serving.spans import ModelSpans  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        raise EntryError("trace_endpoint needs the extra `tracing`") from error
    return ModelSpans(parameters.trace_endpoint, parameters.model, parameters.version)


def engine_settings(parameters: EntryParameters, device: torch.device) -> EngineSettings:
    """Return the engine's settings: the entry's where it has them, else defaults that suit the device.

    Raises:
        SettingsError: a value out of range.
    """
    asked = {name: getattr(parameters, name) for name in _ENGINE_PARAMETERS}
    values: dict[str, Any] = dict(_GPU_DEFAULTS) if device.type == "cuda" else {}
    values |= {name: value for name, value in asked.items() if value is not None}
    return EngineSettings(**values)


def choose_dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of weights and KV cache, and why.

    Raises:
        EntryError: no such dtype.
    """
    if asked == "auto":
        if device.type == "cpu":
            return torch.float32, "few processors compute faster in 16 bits"
        if torch.cuda.is_bf16_supported():
            return torch.bfloat16, "half the memory, and the range of float32"
        return torch.float16, "half the memory; this GPU has no bfloat16"
    if asked not in _DTYPES:
        raise EntryError(f"dtype {asked!r} is not supported; known: auto, {', '.join(_DTYPES)}")
    return _DTYPES[asked], "as asked"
