"""Reads a checkpoint directory, as published, into our own model class.

ChatGLM2, ChatGLM3 and GLM-4 in their original form are read here, where each configuration key means what it
means in `configuration_chatglm.py` and `modeling_chatglm.py`; other families, and GLM-4's other form,
by `triton_models.native` and `triton_models.native_bloom`. No remote code runs, and only tensors are
unpickled. The layouts of weight files are those that transformers writes: one `model.safetensors`, or shards
with `model.safetensors.index.json`; the same for `pytorch_model.bin`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from triton_models.directory import (
    BLOOM_TYPE,
    NATIVE_TYPES,
    ConfigNumbers,
    check_model_type,
    find_shards,
    format_evidence,
    read_json,
)
from triton_models.engine.capacity import GIB, total_bytes
from triton_models.engine.linear import Linear
from triton_models.engine.models.bloom import Bloom, BloomConfig
from triton_models.engine.models.chatglm import ChatGLM, ChatGLMConfig
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.errors import CheckpointError, UnsupportedArchitectureError
from triton_models.native import Place, native_dropped, native_places, read_native_config
from triton_models.native_bloom import BLOOM_PREFIX, bloom_dropped, bloom_places, read_bloom_config
from triton_models.weight_formats import PackedMatrices, WeightFormat, agreed_quantization, read_format

ModelConfig = ChatGLMConfig | DecoderConfig | BloomConfig
"""The shape of a model of any family."""

Model = ChatGLM | Decoder | Bloom
"""A model of any family."""

LoadProgress = Callable[[int, int], None]
"""Called with two byte counts of the model's weights: those filled so far, and the total."""

_IMPLEMENTED: dict[str, object] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "fp32_residual_connection": False,
    "interleaved_qkv": False,
    "tie_word_embeddings": False,
    "pre_seq_len": None,
}
"""For each key, the only value that the forward pass implements, which is also the original's default."""

_DROPPED = {"transformer.rotary_pos_emb.inv_freq"}
"""Checkpoint tensors that are skipped: the model computes them from the configuration."""

_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Shard:
    """One open weight file."""

    names: set[str]
    """Of its tensors."""
    read: Callable[[str], Tensor]
    """Returns a tensor on the CPU, which is backed by the mapped file: valid while the shard is open."""


@dataclass(frozen=True, slots=True)
class _EmptyModel:
    """A model to be filled, and the names that its tensors have in a checkpoint."""

    model: Model
    places: dict[str, Place]
    dropped: set[str]
    """Names that are skipped."""
    prefix: str = ""
    """What some checkpoints put before these names."""


def read_shape(directory: Path) -> ModelConfig:
    """Read and check `config.json` of a checkpoint of any family.

    Raises:
        UnsupportedArchitectureError: the directory holds another kind of model, or a variant that the forward
            pass does not implement.
        CheckpointError: the file is missing or broken, or a value is invalid.
    """
    path = directory / "config.json"
    raw = read_json(path)
    if raw.get("model_type") == BLOOM_TYPE:
        return read_bloom_config(path, raw)
    return read_native_config(path, raw) if raw.get("model_type") in NATIVE_TYPES else read_config(directory)


def read_config(directory: Path) -> ChatGLMConfig:
    """Read and check `config.json` of a checkpoint in the original form.

    Raises:
        UnsupportedArchitectureError, CheckpointError: as `read_shape`.
    """
    path = directory / "config.json"
    raw = read_json(path)
    _refuse_unsupported(path, raw)
    numbers = ConfigNumbers(path, raw)
    size, number = numbers.size, numbers.number
    heads = size("num_attention_heads")
    rope_ratio = number("rope_ratio", 1.0)
    # ChatGLM2's code divides positions by it; all later code multiplies the base of the frequencies.
    interpolates = rope_ratio != 1 and format_evidence(directory) == "chatglm2"
    config = ChatGLMConfig(
        num_layers=size("num_layers"),
        hidden_size=size("hidden_size"),
        ffn_hidden_size=size("ffn_hidden_size"),
        num_attention_heads=heads,
        multi_query_group_num=size("multi_query_group_num")
        if raw.get("multi_query_attention") is True
        else heads,
        kv_channels=size("kv_channels"),
        padded_vocab_size=size("padded_vocab_size"),
        seq_length=size("seq_length"),
        layernorm_epsilon=number("layernorm_epsilon", 1e-5),
        add_qkv_bias=raw.get("add_qkv_bias") is True,
        rope_ratio=1.0 if interpolates else rope_ratio,
        position_ratio=rope_ratio if interpolates else 1.0,
    )
    if heads % config.multi_query_group_num:
        raise CheckpointError(
            f"{path}: num_attention_heads {heads} is no multiple of"
            f" multi_query_group_num {config.multi_query_group_num}"
        )
    if config.kv_channels % 4:
        raise CheckpointError(
            f"{path}: kv_channels {config.kv_channels} is no multiple of 4, which rotary pairs need"
        )
    return config


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
    *,
    quantization: str | None = None,
) -> Model:
    """Read a checkpoint into a model on `device`.

    Files are memory-mapped one at a time and copied tensor by tensor into the model, so that at most about
    one shard is in host memory in addition to the model. With a `quantization` (see `QUANTISATIONS`), all
    matrices but the embedding are quantised as they are copied. A checkpoint that is quantised already stays
    as it is; its output head, too, if it is not quantised.

    Raises:
        CheckpointError: the checkpoint is broken (the message names the file, and the tensor if one is at
            fault), or the model does not fit on the device.
    """
    config = read_shape(directory)
    stored, quantization = read_quantization(directory, quantization)
    shards = find_shards(directory)
    form, head = matrix_forms(stored, quantization)
    if (needed := config.nbytes(dtype, form, head)) > (there := total_bytes(device)):
        raise CheckpointError(
            f"{directory / 'config.json'}: a model of this shape takes {needed / GIB:,.1f} GiB in"
            f" {quantization or dtype}, and {device} has {there / GIB:,.1f}; "
            + _what_would_fit(config, dtype, there, stored)
        )
    empty = _allocate(directory, config, dtype, device, form=form, head=head)
    model, missing = empty.model, empty.places
    total = sum(tensor.nbytes for tensor in missing.values())
    packed = None if stored is None else PackedMatrices(stored, model.embedding, missing)
    filled = 0
    for path, expected in shards.items():
        with open_shard(path) as shard:
            _check_names(path, shard.names, expected)
            for name in sorted(shard.names):
                place = name.removeprefix(empty.prefix)
                if place in empty.dropped:
                    continue
                if packed is not None and packed.has(place):
                    filled += packed.add(path, place, shard.read(name))
                else:
                    filled += _fill(path, name, shard.read, place, missing)
                if progress is not None:
                    progress(filled, total)
            if packed is not None:
                packed.keep()
    absent = [*missing, *(packed.absent() if packed is not None else ())]
    if absent:
        where = next(iter(shards)) if len(shards) == 1 else directory
        raise CheckpointError(f"{where}: tensor {min(absent)!r} is missing ({len(absent)} in all)")
    return model


def _allocate(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    form: type[Linear],
    head: type[Linear],
) -> _EmptyModel:
    match config:
        case ChatGLMConfig():
            chatglm = ChatGLM(config, dtype=dtype, device=device, form=form, head=head)
            return _EmptyModel(chatglm, places(chatglm), _DROPPED)
        case BloomConfig():
            bloom = Bloom(config, dtype=dtype, device=device, form=form, head=head)
            return _EmptyModel(bloom, bloom_places(bloom), bloom_dropped(config), BLOOM_PREFIX)
        case DecoderConfig():
            decoder = Decoder(config, dtype=dtype, device=device, form=form, head=head)
            found = native_places(decoder, read_json(directory / "config.json")["model_type"])
            return _EmptyModel(decoder, found, native_dropped(config))


def read_quantization(directory: Path, wanted: str | None) -> tuple[WeightFormat | None, str | None]:
    """Return the format of a checkpoint that is quantised already, and how its matrices are held.

    That is a name in `QUANTISATIONS`, or None; so is `wanted`, the option's value.

    Raises:
        UnsupportedArchitectureError: a format that cannot be read.
        CheckpointError: `config.json` is broken, or `wanted` is something else.
    """
    path = directory / "config.json"
    stored = read_format(path, read_json(path))
    return stored, agreed_quantization(path, stored, wanted)


def matrix_forms(stored: WeightFormat | None, quantization: str | None) -> tuple[type[Linear], type[Linear]]:
    """Return the forms of a model's matrices, and of its output head."""
    form: type[Linear] = Linear if quantization is None else QUANTISATIONS[quantization]
    return form, Linear if stored is not None and not stored.head else form


def _what_would_fit(config: ModelConfig, dtype: torch.dtype, there: int, stored: WeightFormat | None) -> str:
    if stored is not None and stored.quantization is not None:
        return f"its weights are {stored.quantization} already"
    sizes = {name: config.nbytes(dtype, form) for name, form in QUANTISATIONS.items()}
    for name, size in sizes.items():
        if size <= there:
            return f"with quantization {name} it takes {size / GIB:,.1f}"
    name, size = min(sizes.items(), key=lambda item: item[1])
    return f"no quantization would fit: {name} takes {size / GIB:,.1f}"


def tensor_places(model: ChatGLM) -> dict[str, Tensor]:
    """Return the model's tensors that are not quantised, each under the name that it has in a checkpoint."""
    return {name: place for name, place in places(model).items() if isinstance(place, Tensor)}


def places(model: ChatGLM) -> dict[str, Place]:
    """Return where the tensors of a checkpoint belong, by their names."""
    found: dict[str, Place] = {
        "transformer.embedding.word_embeddings.weight": model.embedding,
        "transformer.encoder.final_layernorm.weight": model.final_norm,
        "transformer.output_layer.weight": model.head.place,
    }
    for number, layer in enumerate(model.layers):
        prefix = f"transformer.encoder.layers.{number}."
        found[prefix + "input_layernorm.weight"] = layer.input_norm
        found[prefix + "self_attention.query_key_value.weight"] = layer.qkv.place
        if layer.qkv.bias is not None:
            found[prefix + "self_attention.query_key_value.bias"] = layer.qkv.bias
        found[prefix + "self_attention.dense.weight"] = layer.attention_out.place
        found[prefix + "post_attention_layernorm.weight"] = layer.post_attention_norm
        found[prefix + "mlp.dense_h_to_4h.weight"] = layer.gate_up.place
        found[prefix + "mlp.dense_4h_to_h.weight"] = layer.down.place
    return found


@contextmanager
def progress_bar(name: str) -> Iterator[LoadProgress]:
    """Show on stderr how far the loading of `name` is; yields the callback for `load_model`'s `progress`."""
    with tqdm(desc=f"loading {name}", unit="B", unit_scale=True) as bar:

        def advance(filled: int, total: int) -> None:
            bar.total = total
            bar.update(filled - bar.n)

        yield advance


@contextmanager
def open_shard(path: Path) -> Iterator[Shard]:
    """Open a weight file. It is memory-mapped: a tensor is read from disk only when it is used.

    Raises:
        CheckpointError: the file is truncated, or not of the type that its name indicates.
    """
    if path.suffix == ".safetensors":
        with ExitStack() as stack:
            with _faults_named(path):
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            yield Shard(set(file.keys()), _faults_named(path)(file.get_tensor))
    else:
        # weights_only: a pickle with anything but tensors and plain containers is refused.
        with _faults_named(path):
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{path}: holds a {type(tensors).__name__} instead of named tensors")
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__} instead of a tensor")
        yield Shard(set(tensors), tensors.__getitem__)


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    check_model_type(path, raw)
    for key, implemented in _IMPLEMENTED.items():
        value = raw.get(key)
        # In the original, JSON's null means the default, and 0 means false.
        if value is not None and bool(value) != bool(implemented):
            raise UnsupportedArchitectureError(f"{path}: {key} {value!r} is not supported")


def _check_names(path: Path, names: set[str], expected: set[str] | None) -> None:
    """Check that a shard holds exactly the tensors that the index, if there is one, lists for it."""
    if expected is None:
        return
    if absent := expected - names:
        raise CheckpointError(f"{path}: tensor {min(absent)!r} is not in it, and the index says that it is")
    if unlisted := names - expected:
        raise CheckpointError(f"{path}: tensor {min(unlisted)!r} is in it, and the index does not say so")


def _fill(path: Path, name: str, read: Callable[[str], Tensor], place: str, missing: dict[str, Place]) -> int:
    """Copy a tensor to its `place` and remove that from `missing`; return the number of bytes copied."""
    if place not in missing:
        raise CheckpointError(f"{path}: tensor {name!r} has no place in this model, or came twice")
    source = read(name)
    destination = missing.pop(place)
    if tuple(source.shape) != tuple(destination.shape):
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(source.shape)} instead of {list(destination.shape)}"
        )
    if source.dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} is {source.dtype}, not a 16 or 32 bit float")
    try:
        destination.copy_(source)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name!r} {error}") from error
    return destination.nbytes


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """Turn any exception that the readers raise for a broken file into an error that names the file."""
    try:
        yield
    except Exception as error:
        # The readers are other libraries' code: damaged bytes can make them raise exceptions of any type.
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: truncated or not a weight file: {detail[0]}") from error
