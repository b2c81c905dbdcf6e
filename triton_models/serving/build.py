"""How a model's service is built: from its entry, to an engine with the weights, before it takes requests."""

import logging
import os
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from triton_models.checkpoint import load_model, progress_bar, read_quantization
from triton_models.engine.backend import Backend, choose_backend
from triton_models.engine.capacity import GIB
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel
from triton_models.engine.ops_cpu import NotCompiledError, compiled
from triton_models.engine.quantised import FP8_CAPABILITY
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.errors import CheckpointError, EntryError, SettingsError
from triton_models.options import EntryParameters
from triton_models.serving.chat_text import load_text
from triton_models.serving.report import EngineMetrics
from triton_models.serving.service import HEARTBEAT_S, Service
from wire.options import OPTIONS

if TYPE_CHECKING:
    from triton_models.serving.spans import ModelSpans

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BFLOAT16_CAPABILITY: Final = (8, 0)
"""Of the first GPUs that compute in bfloat16 (Ampere)."""

_SMALL_BYTES: Final = 128 * 2**20
"""Weights that a CPU's step reads in about ten milliseconds."""

_SWITCH_S: Final = 0.0005
"""Seconds after which a running thread must offer the interpreter lock to others; set only with a GPU."""


def build_service(parameters: EntryParameters, pb_utils: Any) -> Service:
    """Load the checkpoint and build the engine; nothing runs yet.

    Raises:
        ModelError: the checkpoint cannot be served as configured.
    """
    # Text first: it takes milliseconds, and so fails before gigabytes are read.
    text = load_text(parameters)
    options = parameters.options
    spans = make_spans(parameters)
    device = _find_device(parameters.device)
    read = _read_transformers if options.get("engine") == "transformers" else _read_own
    model, backend = read(parameters, device)
    if text.tokenizer.size > model.vocab_size:
        raise CheckpointError(
            f"{parameters.checkpoint}: the tokenizer has {text.tokenizer.size} ids and the weights have"
            f" {model.vocab_size}: they do not belong together"
        )
    engine = Engine(model, engine_settings(parameters, device), backend=backend)
    if device.type == "cuda":
        # Kernels are compiled and libraries loaded at their first use, which must not be a client's request.
        warm_up(engine)
        # Nearly every torch call releases the interpreter lock. While another thread reads the requests of a
        # burst, the engine's thread gets the lock back only after this interval: 5 ms by default, and a step
        # takes 4 ms.
        sys.setswitchinterval(_SWITCH_S)
    return Service(
        engine,
        text,
        EngineMetrics(parameters.model, parameters.version, pb_utils),
        vocabulary=model.vocab_size,
        heartbeat_s=options.get("heartbeat_s", HEARTBEAT_S),
        spans=spans,
    )


def _find_device(name: str) -> torch.device:
    """Return the device of this name (`cpu` or `cuda:N`).

    Raises:
        EntryError: there is no such GPU.
    """
    device = torch.device(name)
    if device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise EntryError(f"device {name}: GPUs that torch can use: {count}")
    return device


def _read_own(parameters: EntryParameters, device: torch.device) -> tuple[CausalModel, Backend]:
    """Read the checkpoint into a model of our own; return it with the backend that suits it."""
    options = parameters.options
    stored, quantization = read_quantization(parameters.checkpoint, options.get("quantization"))
    quantised = stored is not None and stored.quantization is not None
    dtype = _dtype(parameters, device, quantization, stored=quantised)
    backend = choose_backend(device, dtype)
    with progress_bar(parameters.model) as progress:
        model = load_model(
            parameters.checkpoint,
            dtype,
            device,
            progress,
            quantization=quantization,
            chat_format=options.get("format"),
            as_stored=backend.reads_16_bits,
        )
    weights = f"weights in {quantization or model.embedding.dtype}"
    _note_weights(parameters.model, weights, model.nbytes, device)
    return model, backend


def _read_transformers(parameters: EntryParameters, device: torch.device) -> tuple[CausalModel, Backend]:
    """Read the checkpoint into transformers' own class; return it with the backend that suits it."""
    options = parameters.options
    if "quantization" in options:
        raise SettingsError("quantization is not supported with engine transformers")
    # Seconds to import, and nobody else needs it.
    from triton_models.transformers_checkpoint import load_transformers  # noqa: PLC0415

    dtype = _dtype(parameters, device, None)
    model = load_transformers(parameters.checkpoint, dtype, device, max_context=options.get("max_context"))
    _note_weights(parameters.model, f"transformers' weights in {dtype}", model.nbytes, device)
    backend = choose_backend(device, dtype)
    # Whether its modules do the same work whatever the tokens, as graphs need, is known of none.
    return model, replace(backend, graphs=False, reason=f"transformers' forward pass, and {backend.reason}")


def _note_weights(name: str, weights: str, size: int, device: torch.device) -> None:
    """Log what they take; if that is little of a CPU, leave a core to Triton and the gateway."""
    log.info("%s: %s take %.2f GiB of %s", name, weights, size / GIB, device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and size < _SMALL_BYTES:
        # A step takes hardly longer than what they do for it meanwhile. A thread of torch's on their core
        # would have all its others wait for it, many times in a step.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _dtype(
    parameters: EntryParameters, device: torch.device, quantization: str | None, *, stored: bool = False
) -> torch.dtype:
    wanted = parameters.options.get("dtype", "auto")
    dtype, reason = choose_dtype(wanted, device, quantization, stored=stored)
    log.info("%s: %s on %s: %s", parameters.model, dtype, device, reason)
    return dtype


def make_spans(parameters: EntryParameters) -> "ModelSpans | None":
    """Return the sender of the model's own spans; None if the entry does not ask for them.

    Raises:
        EntryError: the extra `tracing` is not installed.
    """
    endpoint = parameters.options.get("trace_endpoint")
    if endpoint is None:
        return None
    try:
        from triton_models.serving.spans import ModelSpans  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        raise EntryError("trace_endpoint needs the extra `tracing`") from error
    return ModelSpans(endpoint, parameters.model, parameters.version)


def engine_settings(parameters: EntryParameters, device: torch.device) -> EngineSettings:
    """Return the engine's settings: the entry's where it has them, else defaults that suit the device.

    Raises:
        SettingsError: values that contradict each other.
    """
    known = {field.name for field in fields(EngineSettings)}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.name in known:
            default = option.gpu if device.type == "cuda" else None
            value = parameters.options.get(option.name, default)
            if value is not None:
                values[option.name] = value
    return EngineSettings(**values)


def choose_dtype(
    wanted: str, device: torch.device, quantization: str | None = None, *, stored: bool = False
) -> tuple[torch.dtype, str]:
    """Return the dtype of the KV cache and of weights that are not quantised, and why.

    `stored` says that the checkpoint is quantised already. On a CPU, such a one is served however slow that
    is, while quantising is offered only where products with such weights are compiled.

    Raises:
        SettingsError: the weights are to be quantised in a way that the device is not made for.
    """
    if quantization == "fp8":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise SettingsError(
                f"quantization fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper), not {device}"
            )
        if wanted not in ("auto", "bfloat16"):
            raise SettingsError("quantization fp8 needs dtype auto or bfloat16")
        return torch.bfloat16, "as the GPU's products with fp8 weights need"
    if quantization is not None and device.type == "cpu":
        return _choose_quantised(wanted, quantization, stored=stored)
    if wanted != "auto":
        return _DTYPES[wanted], "as set"
    if device.type == "cpu":
        return torch.float32, "few CPUs compute faster in 16 bits"
    # Not `is_bf16_supported`, which says so of GPUs that only emulate it, too.
    if torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY:
        return torch.bfloat16, "half the memory, and the range of float32"
    return torch.float16, "half the memory; this GPU has no bfloat16"


def _choose_quantised(wanted: str, quantization: str, *, stored: bool) -> tuple[torch.dtype, str]:
    """Choose for int8 or int4 on a CPU."""
    if wanted not in ("auto", "float32"):
        raise SettingsError(f"quantization {quantization} on a CPU needs dtype auto or float32")
    try:
        compiled()
    except NotCompiledError as error:
        if not stored:
            raise SettingsError(
                f"quantization {quantization} is not offered on this CPU: {error}; leave it out"
            ) from error
        return torch.float32, f"{quantization} weights are expanded in each product, which is slow: {error}"
    return torch.float32, f"as the products with {quantization} weights are compiled for this CPU"
