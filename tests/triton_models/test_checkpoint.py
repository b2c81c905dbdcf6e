import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from triton_models.checkpoint import load_model, progress_bar, read_config
from triton_models.engine.linear import Linear
from triton_models.engine.models.chatglm import ChatGLM, LayerWeights
from triton_models.errors import CheckpointError, UnsupportedArchitectureError

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
HEAD = "transformer.output_layer.weight"
DENSE = "transformer.encoder.layers.1.self_attention.dense.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the golden ChatGLM3 checkpoint, to be spoilt."""
    copy = tmp_path / "model"
    shutil.copytree(GOLDEN / "chatglm3", copy)
    return copy


def configure(directory: Path, name: str = "config.json", **values: Any) -> None:
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def load(directory: Path) -> ChatGLM:
    return load_model(directory, torch.float32, CPU)


def respread(directory: Path, shards: int, suffix: str) -> list[Path]:
    """Write the weights again as several shards with an index."""
    single = directory / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    stem, extension = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[suffix]
    paths = [directory / f"{stem}-{number + 1:05}-of-{shards:05}.{extension}" for number in range(shards)]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in paths]
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[number % shards][name] = tensor
    for path, part in zip(paths, parts, strict=True):
        write(path, part)
    index = {
        "weight_map": {name: path.name for path, part in zip(paths, parts, strict=True) for name in part}
    }
    (directory / f"{stem}.{extension}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return paths


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_the_golden_configurations(name: str) -> None:
    config = read_config(GOLDEN / name)
    raw = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    for key in (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "multi_query_group_num",
        "kv_channels",
        "padded_vocab_size",
        "seq_length",
        "layernorm_epsilon",
        "add_qkv_bias",
    ):
        assert getattr(config, key) == raw[key]
    assert config.rope_ratio == 1


def test_without_multi_query_attention_every_head_is_a_group(directory: Path) -> None:
    configure(directory, multi_query_attention=False)
    assert read_config(directory).multi_query_group_num == 8


def test_rope_ratio_is_read_and_null_flags_are_defaults(directory: Path) -> None:
    configure(directory, rope_ratio=50, pre_seq_len=None, quantization_bit=0, rmsnorm=None)
    assert read_config(directory).rope_ratio == 50


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rmsnorm", False),
        ("post_layer_norm", False),
        ("apply_residual_connection_post_layernorm", True),
        ("add_bias_linear", True),
        ("fp32_residual_connection", True),
        ("interleaved_qkv", True),
        ("tie_word_embeddings", True),
        ("quantization_bit", 4),
        ("pre_seq_len", 128),
        ("model_type", "llama"),
        ("model_type", None),
    ],
)
def test_what_the_forward_pass_does_not_do_is_refused_by_name(
    directory: Path, key: str, value: object
) -> None:
    configure(directory, **{key: value})
    with pytest.raises(UnsupportedArchitectureError, match=rf"config\.json: {key} .*not supported"):
        read_config(directory)


@pytest.mark.parametrize("model_type", ["glm", "glm4"])
def test_a_conversion_to_native_classes_is_refused_by_its_name(directory: Path, model_type: str) -> None:
    configure(directory, model_type=model_type)
    with pytest.raises(UnsupportedArchitectureError, match=f"own classes .*{model_type}.*not supported yet"):
        read_config(directory)


def test_a_model_that_sees_is_refused(directory: Path) -> None:
    configure(directory, vision_config={"image_size": 1120})
    with pytest.raises(UnsupportedArchitectureError, match="sees images"):
        read_config(directory)


def test_long_context_chatglm2_is_refused(directory: Path) -> None:
    configure(directory, rope_ratio=16)
    configure(directory, "tokenizer_config.json", name_or_path="THUDM/chatglm2-6b-32k")
    with pytest.raises(UnsupportedArchitectureError, match="long-context ChatGLM2"):
        read_config(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 0),
        ("hidden_size", "128"),
        ("seq_length", None),
        ("kv_channels", True),
        ("kv_channels", 18),
        ("multi_query_group_num", 3),
        ("layernorm_epsilon", 0),
        ("rope_ratio", "50"),
    ],
)
def test_values_that_make_no_sense_are_named(directory: Path, key: str, value: object) -> None:
    configure(directory, **{key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key}"):
        read_config(directory)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [2, 5])
def test_shards_hold_the_same_model(directory: Path, suffix: str, shards: int) -> None:
    whole = load(GOLDEN / "chatglm3")
    respread(directory, shards, suffix)
    spread = load(directory)
    assert torch.equal(spread.embedding, whole.embedding)
    assert torch.equal(spread.head.weight, whole.head.weight)
    assert torch.equal(spread.final_norm, whole.final_norm)
    for mine, theirs in zip(spread.layers, whole.layers, strict=True):
        for field in fields(LayerWeights):
            one, other = getattr(mine, field.name), getattr(theirs, field.name)
            if isinstance(one, Linear):
                one, other = one.weight, other.weight
            assert torch.equal(one, other), field.name
        assert torch.equal(mine.qkv.bias, theirs.qkv.bias)


def test_weights_become_the_asked_for_dtype_and_norms_stay_single() -> None:
    model = load_model(GOLDEN / "chatglm3", torch.bfloat16, CPU)
    assert (model.dtype, model.head.weight.dtype, model.layers[0].qkv.weight.dtype) == (torch.bfloat16,) * 3
    assert model.final_norm.dtype == torch.float32


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(DENSE), rf"model\.safetensors: tensor '{DENSE}' is missing"),
        (
            lambda tensors: tensors.update({"transformer.extra": torch.ones(1)}),
            r"model\.safetensors: tensor 'transformer\.extra' has no place",
        ),
        (
            lambda tensors: tensors.update({HEAD: torch.ones(1152, 64)}),
            rf"model\.safetensors: tensor '{HEAD}' has shape \[1152, 64\] instead of \[1152, 128\]",
        ),
        (
            lambda tensors: tensors.update({HEAD: torch.ones((1152, 128), dtype=torch.int8)}),
            rf"model\.safetensors: tensor '{HEAD}' is torch\.int8",
        ),
    ],
)
def test_tensors_that_are_wrong_are_named_with_their_file(
    directory: Path, edit: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    change(directory, edit)
    with pytest.raises(CheckpointError, match=words):
        load(directory)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_tensor_that_is_not_where_the_index_says(directory: Path, suffix: str) -> None:
    first, second = respread(directory, 2, suffix)
    # The shards change names: the index is wrong for each tensor of either.
    first.rename(directory / "swap")
    second.rename(first)
    (directory / "swap").rename(second)
    with pytest.raises(CheckpointError, match=rf"{first.name}: tensor 'transformer\..*' is not in it"):
        load(directory)


def test_a_tensor_that_the_index_does_not_list(directory: Path) -> None:
    first, _ = respread(directory, 2, "safetensors")
    save_file(load_file(first) | {"stray": torch.ones(1)}, first)
    with pytest.raises(
        CheckpointError, match=f"{first.name}: tensor 'stray' is in it, and the index does not"
    ):
        load(directory)


def test_a_tensor_that_the_index_forgot(directory: Path) -> None:
    respread(directory, 1, "bin")
    index = directory / "pytorch_model.bin.index.json"
    document = json.loads(index.read_text(encoding="utf-8"))
    del document["weight_map"][HEAD]
    index.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"tensor '{HEAD}' is in it, and the index does not"):
        load(directory)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_truncated_shard_is_named(directory: Path, suffix: str) -> None:
    second = respread(directory, 2, suffix)[1]
    second.write_bytes(second.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=f"{second.name}: truncated"):
        load(directory)


def test_progress_ends_at_the_whole_model() -> None:
    calls: list[tuple[int, int]] = []
    load_model(GOLDEN / "chatglm2", torch.float32, CPU, lambda filled, total: calls.append((filled, total)))
    filled = [each for each, _ in calls]
    assert filled == sorted(filled)
    assert len(calls) == 17
    assert calls[-1][0] == calls[-1][1]


def test_the_progress_bar_is_on_stderr_and_silence_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    load(GOLDEN / "chatglm2")
    assert capfd.readouterr() == ("", "")
    with progress_bar("demo") as progress:
        load_model(GOLDEN / "chatglm2", torch.float32, CPU, progress)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "loading demo: 100%" in shown.err
