"""The families of checkpoints: what is read of each, what is refused, and how it is laid out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.triton_models.engine.models.whole_pass import whole_pass
from tests.triton_models.native_checkpoint import write_bloom, write_native
from triton_models.checkpoint import load_model
from triton_models.directory import NATIVE_TYPES
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.models.positions import Interpolation, Rope
from triton_models.engine.ops_cpu import compile_linear
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.errors import CheckpointError, UnsupportedArchitectureError
from triton_models.families import _FAMILIES, read_shape

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"
GOLDEN = Path(__file__).parents[1] / "golden"


def configure(directory: Path, *removed: str, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: each for key, each in config.items() if key not in removed}))


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    *,
    as_stored: bool = False,
) -> Decoder:
    return load_model(directory, dtype, CPU, quantization=quantization, as_stored=as_stored)


def write_chatglm(directory: Path) -> None:
    shutil.copytree(GOLDEN / "chatglm3", directory, dirs_exist_ok=True)


def write_llama(directory: Path) -> None:
    write_native(directory, "llama")


def test_the_families_are_known_without_torch() -> None:
    assert set(NATIVE_TYPES) == set(_FAMILIES)


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_the_golden_configurations(name: str) -> None:
    raw = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    assert read_shape(GOLDEN / name) == DecoderConfig(
        layers=raw["num_layers"],
        hidden=raw["hidden_size"],
        feed_forward=raw["ffn_hidden_size"],
        query_heads=raw["num_attention_heads"],
        kv_heads=raw["multi_query_group_num"],
        head_dim=raw["kv_channels"],
        vocabulary=raw["padded_vocab_size"],
        positions=raw["seq_length"],
        epsilon=raw["layernorm_epsilon"],
        rope=Rope(share=0.5, base=10_000.0),
        qkv_bias=raw["add_qkv_bias"],
    )


def test_without_multi_query_attention_every_head_is_a_group(tmp_path: Path) -> None:
    write_chatglm(tmp_path)
    configure(tmp_path, multi_query_attention=False)
    assert read_shape(tmp_path).kv_heads == 8


def test_rope_ratio_multiplies_the_base_and_null_flags_are_defaults(tmp_path: Path) -> None:
    write_chatglm(tmp_path)
    configure(tmp_path, rope_ratio=50, pre_seq_len=None, quantization_bit=0, rmsnorm=None)
    assert read_shape(tmp_path).rope == Rope(share=0.5, base=500_000.0)


def test_long_context_chatglm2_divides_positions_instead(tmp_path: Path) -> None:
    write_chatglm(tmp_path)
    configure(tmp_path, rope_ratio=16)
    (tmp_path / "tokenizer_config.json").write_text('{"name_or_path": "THUDM/chatglm2-6b-32k"}')
    assert read_shape(tmp_path).rope == Rope(share=0.5, base=10_000.0, scaling=Interpolation(factor=16))


def test_the_format_that_is_given_says_what_the_ratio_means(tmp_path: Path) -> None:
    write_chatglm(tmp_path)
    configure(tmp_path, rope_ratio=16)
    divided = Rope(share=0.5, base=10_000.0, scaling=Interpolation(factor=16))
    assert read_shape(tmp_path, "chatglm2").rope == divided
    configure(tmp_path, _name_or_path="THUDM/chatglm2-6b")
    assert read_shape(tmp_path, "chatglm3").rope == Rope(share=0.5, base=160_000.0)


def test_a_model_that_sees_is_refused(tmp_path: Path) -> None:
    write_chatglm(tmp_path)
    configure(tmp_path, vision_config={"image_size": 1120})
    with pytest.raises(UnsupportedArchitectureError, match="sees images"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("write", "key", "value"),
    [
        (write_chatglm, "rmsnorm", False),
        (write_chatglm, "post_layer_norm", False),
        (write_chatglm, "apply_residual_connection_post_layernorm", True),
        (write_chatglm, "add_bias_linear", True),
        (write_chatglm, "fp32_residual_connection", True),
        (write_chatglm, "interleaved_qkv", True),
        (write_chatglm, "tie_word_embeddings", True),
        (write_chatglm, "pre_seq_len", 128),
        (write_chatglm, "model_type", "gpt2"),
        (write_chatglm, "model_type", None),
        (write_bloom, "apply_residual_connection_post_layernorm", True),
        (write_bloom, "architectures", ["BloomForSequenceClassification"]),
    ],
)
def test_what_the_forward_pass_does_not_do_is_refused_by_name(
    tmp_path: Path, write: Callable[[Path], object], key: str, value: object
) -> None:
    write(tmp_path)
    configure(tmp_path, **{key: value})
    with pytest.raises(UnsupportedArchitectureError, match=rf"config\.json: {key} .*not supported"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_variants_of_transformers_classes_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    write_native(tmp_path, family)
    configure(tmp_path, **changes)
    with pytest.raises(UnsupportedArchitectureError, match=named):
        read_shape(tmp_path)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaling_that_is_no_object_is_refused(tmp_path: Path, key: str) -> None:
    write_native(tmp_path, "qwen2")
    configure(tmp_path, **{key: "yarn"})
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} must be an object, not 'yarn'"):
        read_shape(tmp_path)


def test_a_window_that_is_no_number_is_refused(tmp_path: Path) -> None:
    write_native(tmp_path, "mistral")
    configure(tmp_path, sliding_window="half")
    with pytest.raises(CheckpointError, match="sliding_window"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "positions"),
    [
        ("mistral", {"sliding_window": 256}, 256),
        ("mistral", {"sliding_window": 128}, 128),
        ("mistral", {"sliding_window": 256, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 256),
        ("mistral", {"sliding_window": None}, 256),
        ("qwen2", {"sliding_window": 128}, 256),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, 128),
        ("qwen3", {"sliding_window": 128, "use_sliding_window": False}, 256),
    ],
)
def test_a_context_is_within_the_window_of_attention(
    tmp_path: Path, family: str, changes: dict[str, Any], positions: int
) -> None:
    write_native(tmp_path, family)
    configure(tmp_path, **changes)
    assert read_shape(tmp_path).positions == positions


@pytest.mark.parametrize(
    ("write", "key", "value"),
    [
        (write_chatglm, "num_layers", 0),
        (write_chatglm, "hidden_size", "128"),
        (write_chatglm, "seq_length", None),
        (write_chatglm, "kv_channels", True),
        (write_chatglm, "kv_channels", 18),
        (write_chatglm, "multi_query_group_num", 3),
        (write_chatglm, "layernorm_epsilon", 0),
        (write_chatglm, "rope_ratio", "50"),
        (write_llama, "hidden_size", 0),
        (write_llama, "vocab_size", None),
        (write_llama, "rms_norm_eps", "small"),
        (write_llama, "num_key_value_heads", 3),
        (write_bloom, "n_layer", 0),
        (write_bloom, "vocab_size", None),
        (write_bloom, "n_head", 3),
    ],
)
def test_values_that_make_no_sense_are_named(
    tmp_path: Path, write: Callable[[Path], object], key: str, value: object
) -> None:
    write(tmp_path)
    configure(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key}"):
        read_shape(tmp_path)


def test_keys_of_older_files_mean_the_same(tmp_path: Path) -> None:
    write_native(tmp_path, "glm")
    now = read_shape(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw |= {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "rope_scaling": None}
    del raw["rope_parameters"], raw["attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert read_shape(tmp_path) == now


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_scaling_that_was_added_to_a_newer_file_holds(tmp_path: Path, key: str) -> None:
    """As model cards tell to, and as in transformers."""
    write_native(tmp_path, "qwen3")
    added = {"factor": 4.0, "original_max_position_embeddings": 64}
    configure(tmp_path, rope_scaling=added | {key: "yarn"})
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["rope_type"] == "yarn"
    found = read_shape(tmp_path).rope
    configure(tmp_path, rope_parameters=theirs, rope_scaling=None)
    assert found == read_shape(tmp_path).rope


def test_scaling_makes_a_context_longer(tmp_path: Path) -> None:
    write_native(tmp_path, "qwen2")
    configure(tmp_path, rope_parameters=None, rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    assert read_shape(tmp_path).positions == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    configure(tmp_path, rope_scaling=yarn)
    assert read_shape(tmp_path).positions == 1024


def test_keys_of_the_published_files_of_bloom_mean_the_same(tmp_path: Path) -> None:
    write_bloom(tmp_path)
    now = read_shape(tmp_path)
    configure(
        tmp_path, "hidden_size", "n_head", "n_layer", "tie_word_embeddings",
        n_embed=80, num_attention_heads=4, num_hidden_layers=3,
    )  # fmt: skip
    assert read_shape(tmp_path) == now
    configure(tmp_path, "seq_length", "layer_norm_epsilon")
    assert read_shape(tmp_path).positions == 2048


@pytest.mark.parametrize("family", ["glm4", "qwen2"])
def test_shards_are_the_same_model(tmp_path: Path, family: str) -> None:
    write_native(tmp_path / "one", family)
    write_native(tmp_path / "many", family, max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (load(tmp_path / each) for each in ("one", "many"))
    for first, second in zip(one.layers, many.layers, strict=True):
        assert torch.equal(first.qkv.weight, second.qkv.weight)
        assert torch.equal(first.up.weight, second.up.weight)


def test_a_tied_head_takes_no_memory_and_its_copy_is_skipped(tmp_path: Path) -> None:
    write_native(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()


def test_names_of_bloom_may_lack_their_beginning(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("write", "prefix", "name"),
    [
        (write_llama, "", "model.layers.1.self_attn.k_proj.weight"),
        (write_bloom, "transformer.", "h.1.mlp.dense_h_to_4h.bias"),
    ],
)
def test_a_missing_tensor_is_named(
    tmp_path: Path, write: Callable[[Path], object], prefix: str, name: str
) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[prefix + name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        load(tmp_path)


def write(directory: Path, family: str) -> None:
    """Write a checkpoint of transformers' classes, or of ChatGLM."""
    if family == "chatglm":
        write_chatglm(directory)
    elif family == "untied bloom":
        write_bloom(directory, tie_word_embeddings=False)
    else:
        write_native(directory, family)


FAMILIES = ("chatglm", *NATIVE_TYPES, "bloom", "untied bloom")


@pytest.mark.parametrize("name", QUANTISATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_matrix_are_quantised_where_they_belong(tmp_path: Path, family: str, name: str) -> None:
    write(tmp_path, family)
    plain, quantised = load(tmp_path), load(tmp_path, quantization=name)
    pairs = [] if plain.config.tied else [(quantised.head, plain.head)]
    for mine, theirs in zip(quantised.layers, plain.layers, strict=True):
        pairs += [(getattr(mine, each), getattr(theirs, each)) for each in plain.config.matrices]
    for found, matrix in pairs:
        assert isinstance(found, QUANTISATIONS[name])
        rows, columns = matrix.weight.shape
        expected = QUANTISATIONS[name].empty(rows, columns, bias=False, dtype=torch.float32, device=CPU)
        expected.place.copy_(matrix.weight)
        assert torch.equal(found.dense(0, rows), expected.dense(0, rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_of_16_bits_as_they_are_stored(tmp_path: Path, family: str) -> None:
    write(tmp_path, family)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    wide, narrow = load(tmp_path), load(tmp_path, as_stored=True)
    assert {narrow.embedding.dtype, narrow.head.weight.dtype} == {torch.bfloat16}
    for model in (wide, narrow):
        model.convert(compile_linear)
    tokens = list(range(5, 40))
    assert torch.equal(whole_pass(narrow, tokens), whole_pass(wide, tokens))


def tensors_in(found: Any) -> list[torch.Tensor]:
    """Every tensor that an object refers to, each once."""
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found if isinstance(found, list) else []
    if not parts and type(found).__module__.startswith("triton_models."):
        names = getattr(found, "__slots__", ()) or vars(found)
        parts = [getattr(found, name) for name in names]
    each = {tensor.data_ptr(): tensor for part in parts for tensor in tensors_in(part)}
    return list(each.values())


@pytest.mark.parametrize("quantization", [None, *QUANTISATIONS])
@pytest.mark.parametrize("family", FAMILIES)
def test_nbytes_are_what_is_allocated(tmp_path: Path, family: str, quantization: str | None) -> None:
    write(tmp_path, family)
    model = load(tmp_path, torch.bfloat16, quantization)
    assert model.nbytes == sum(each.nbytes for each in tensors_in(model))


@pytest.mark.parametrize("page", ["models.md", "models.zh.md"])
def test_every_family_is_in_the_documents(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert {family.architecture for family in _FAMILIES.values() if family.architecture not in text} == set()
