"""Checkpoints of BLOOM: what is read, what is refused, and how it is laid out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.triton_models.native_checkpoint import write_bloom
from triton_models.checkpoint import load_model, read_shape
from triton_models.engine.linear import Linear
from triton_models.engine.models.bloom import Bloom, BloomConfig, Norm
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.errors import CheckpointError, UnsupportedArchitectureError

CPU = torch.device("cpu")


def configure(directory: Path, *removed: str, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: each for key, each in config.items() if key not in removed}))


def config_of(directory: Path) -> BloomConfig:
    config = read_shape(directory)
    assert isinstance(config, BloomConfig)
    return config


def load(directory: Path, dtype: torch.dtype = torch.float32, quantization: str | None = None) -> Bloom:
    model = load_model(directory, dtype, CPU, quantization=quantization)
    assert isinstance(model, Bloom)
    return model


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("apply_residual_connection_post_layernorm", True),
        ("architectures", ["BloomForSequenceClassification"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    write_bloom(tmp_path)
    configure(tmp_path, **{key: value})
    with pytest.raises(UnsupportedArchitectureError, match=rf"config\.json: {key} .*not supported"):
        read_shape(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("n_layer", 0), ("vocab_size", None), ("n_head", 3)])
def test_values_that_make_no_sense_are_named(tmp_path: Path, key: str, value: object) -> None:
    write_bloom(tmp_path)
    configure(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key}"):
        read_shape(tmp_path)


def test_keys_of_the_published_files_mean_the_same(tmp_path: Path) -> None:
    write_bloom(tmp_path)
    now = config_of(tmp_path)
    configure(
        tmp_path, "hidden_size", "n_head", "n_layer", "tie_word_embeddings",
        n_embed=80, num_attention_heads=4, num_hidden_layers=3,
    )  # fmt: skip
    assert config_of(tmp_path) == now
    configure(tmp_path, "seq_length", "layer_norm_epsilon")
    assert config_of(tmp_path).positions == 2048


def test_names_may_lack_their_beginning(tmp_path: Path) -> None:
    write_bloom(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith("transformer.") for name in tensors)
    one = load(tmp_path)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    save_file(bare, tmp_path / "model.safetensors")
    other = load(tmp_path)
    assert other.head.weight.data_ptr() == other.embedding.data_ptr()
    assert torch.equal(one.embedding, other.embedding)
    for first, second in zip(one.layers, other.layers, strict=True):
        assert torch.equal(first.qkv.weight, second.qkv.weight)
        assert torch.equal(first.down.weight, second.down.weight)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_bloom(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.dense_h_to_4h.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'h\.1\.mlp\.dense_h_to_4h\.bias' is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_a_matrix_is_quantised_row_by_row_where_its_rows_belong(tmp_path: Path, name: str) -> None:
    write_bloom(tmp_path)
    plain, quantised = load(tmp_path), load(tmp_path, quantization=name)
    for mine, theirs in zip(quantised.layers, plain.layers, strict=True):
        rows, columns = theirs.qkv.weight.shape
        expected = QUANTISATIONS[name].empty(rows, columns, bias=False, dtype=torch.float32, device=CPU)
        expected.place.copy_(theirs.qkv.weight)
        assert isinstance(mine.qkv, QUANTISATIONS[name])
        assert torch.equal(mine.qkv.dense(0, rows), expected.dense(0, rows))


@pytest.mark.parametrize("quantization", [None, *QUANTISATIONS])
@pytest.mark.parametrize("tied", [True, False])
def test_nbytes_are_what_is_allocated(tmp_path: Path, quantization: str | None, *, tied: bool) -> None:
    write_bloom(tmp_path, tie_word_embeddings=tied)
    model = load(tmp_path, torch.bfloat16, quantization)
    norms: list[Norm] = [model.embedding_norm, model.final_norm]
    matrices = [] if tied else [model.head]
    for layer in model.layers:
        norms += [layer.input_norm, layer.feed_forward_norm]
        matrices += [layer.qkv, layer.attention_out, layer.up, layer.down]
    tensors = [model.embedding, model._alibi.slopes]
    tensors += [tensor for norm in norms for tensor in (norm.weight, norm.bias)]
    for matrix in matrices:
        parts = [matrix.weight, matrix.bias, getattr(matrix, "scales", None)]
        tensors += [each for each in parts if each is not None]
    form = Linear if quantization is None else QUANTISATIONS[quantization]
    assert model.config.nbytes(torch.bfloat16, form) == sum(each.nbytes for each in tensors)
