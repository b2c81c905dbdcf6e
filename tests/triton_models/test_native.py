"""Checkpoints of transformers' own classes: what is read, what is refused, and how it is laid out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.triton_models.native_checkpoint import write_native
from triton_models import native
from triton_models.checkpoint import load_model, read_shape
from triton_models.directory import NATIVE_TYPES
from triton_models.engine.linear import Linear
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.errors import CheckpointError, UnsupportedArchitectureError
from triton_models.native import _FAMILIES

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"


def configure(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(config), encoding="utf-8")


def config_of(directory: Path) -> DecoderConfig:
    config = read_shape(directory)
    assert isinstance(config, DecoderConfig)
    return config


def load(directory: Path, dtype: torch.dtype = torch.float32, quantization: str | None = None) -> Decoder:
    model = load_model(directory, dtype, CPU, quantization=quantization)
    assert isinstance(model, Decoder)
    return model


def test_the_families_are_known_without_torch() -> None:
    assert set(NATIVE_TYPES) == set(native._FAMILIES)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": 128}, "sliding_window 128"),
        (
            "mistral",
            {"sliding_window": 256, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "sliding_window 256 .* the 1024 positions",
        ),
        (
            "mistral",
            {"sliding_window": 256, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "sliding_window 256 .* the 1024 positions",
        ),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, "sliding_window 128"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    write_native(tmp_path, family)
    configure(tmp_path, **changes)
    with pytest.raises(UnsupportedArchitectureError, match=named):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"sliding_window": 128}),
        ("qwen3", {"sliding_window": 128, "use_sliding_window": False}),
    ],
)
def test_a_window_that_holds_everything_or_is_off_is_none(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    write_native(tmp_path, family)
    configure(tmp_path, **changes)
    assert config_of(tmp_path).positions == 256


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 0), ("vocab_size", None), ("rms_norm_eps", "small"), ("num_key_value_heads", 3)],
)
def test_values_that_make_no_sense_are_named(tmp_path: Path, key: str, value: object) -> None:
    write_native(tmp_path, "llama")
    configure(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key}"):
        read_shape(tmp_path)


def test_keys_of_older_files_mean_the_same(tmp_path: Path) -> None:
    write_native(tmp_path, "glm")
    now = config_of(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw |= {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "rope_scaling": None}
    del raw["rope_parameters"], raw["attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert config_of(tmp_path) == now


def test_scaling_makes_a_context_longer(tmp_path: Path) -> None:
    write_native(tmp_path, "qwen2")
    configure(tmp_path, rope_parameters=None, rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    assert config_of(tmp_path).positions == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    configure(tmp_path, rope_scaling=yarn)
    assert config_of(tmp_path).positions == 1024


@pytest.mark.parametrize("family", ["glm4", "qwen2"])
def test_shards_are_the_same_model(tmp_path: Path, family: str) -> None:
    write_native(tmp_path / "one", family)
    write_native(tmp_path / "many", family, max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (load(tmp_path / each) for each in ("one", "many"))
    for first, second in zip(one.layers, many.layers, strict=True):
        assert torch.equal(first.qkv.weight, second.qkv.weight)
        assert torch.equal(first.gate_up.weight, second.gate_up.weight)


def test_a_tied_head_takes_no_memory_and_its_copy_is_skipped(tmp_path: Path) -> None:
    write_native(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_native(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.self_attn\.k_proj\.weight' is missing"):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("name", QUANTISATIONS)
@pytest.mark.parametrize("family", ["glm4", "llama", "qwen2"])
def test_parts_of_a_matrix_are_quantised_where_they_belong(tmp_path: Path, family: str, name: str) -> None:
    write_native(tmp_path, family)
    plain, quantised = load(tmp_path), load(tmp_path, quantization=name)
    pairs = [] if plain.config.tied else [(quantised.head, plain.head)]
    for mine, theirs in zip(quantised.layers, plain.layers, strict=True):
        pairs += [(mine.qkv, theirs.qkv), (mine.gate_up, theirs.gate_up), (mine.down, theirs.down)]
        pairs.append((mine.attention_out, theirs.attention_out))
    for found, matrix in pairs:
        assert isinstance(found, QUANTISATIONS[name])
        rows, columns = matrix.weight.shape
        expected = QUANTISATIONS[name].empty(rows, columns, bias=False, dtype=torch.float32, device=CPU)
        expected.place.copy_(matrix.weight)
        assert torch.equal(found.dense(0, rows), expected.dense(0, rows))


@pytest.mark.parametrize("quantization", [None, *QUANTISATIONS])
@pytest.mark.parametrize("family", NATIVE_TYPES)
def test_nbytes_are_what_is_allocated(tmp_path: Path, family: str, quantization: str | None) -> None:
    write_native(tmp_path, family)
    model = load(tmp_path, torch.bfloat16, quantization)
    tensors = [model.embedding, model.final_norm, model._rotary.cos, model._rotary.sin]
    matrices = [] if model.config.tied else [model.head]
    for layer in model.layers:
        matrices += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
        norms = [layer.input_norm, layer.query_norm, layer.key_norm, layer.attention_norm]
        tensors += [each for each in [*norms, layer.feed_forward_norm, layer.output_norm] if each is not None]
    for matrix in matrices:
        parts = [matrix.weight, matrix.bias, getattr(matrix, "scales", None)]
        tensors += [each for each in parts if each is not None]
    form = Linear if quantization is None else QUANTISATIONS[quantization]
    assert model.config.nbytes(torch.bfloat16, form) == sum(each.nbytes for each in tensors)


@pytest.mark.parametrize("page", ["models.md", "models.zh.md"])
def test_every_family_is_in_the_documents(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert {family.architecture for family in _FAMILIES.values() if family.architecture not in text} == set()
