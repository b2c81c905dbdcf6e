"""The gateway's arithmetic is the engine's, which it may not import."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands import size as sizing
from gateway.commands.size import (
    GIB,
    Shape,
    SizingError,
    read_shape,
)
from gateway.commands.size import (
    fit as size,
)
from tests.triton_models.test_weight_formats import FORMATS
from triton_models import families
from triton_models.checkpoint import load_model, read_quantization
from triton_models.directory import NATIVE_TYPES
from triton_models.embedded.errors import SetupError
from triton_models.embedded.models import read_model_argument
from triton_models.engine import backend, capacity, graphs
from triton_models.engine.linear import Linear
from triton_models.engine.ops_hopper import HOPPER_ROWS
from triton_models.engine.quantised import GROUP, QUANTISATIONS
from triton_models.engine.sampler import PlainRules
from wire.options import OPTIONS

GOLDEN = Path(__file__).parents[2] / "golden"
CHATGLM3_6B = Shape(
    layers=28,
    hidden=4096,
    ffn=13696,
    query_heads=32,
    kv_heads=2,
    head=128,
    vocabulary=65024,
    context=8192,
    bias=True,
)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["size", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    shape = read_shape(GOLDEN / name)
    assert shape.weight_bytes(dtype.itemsize) == families.read_shape(GOLDEN / name).nbytes(dtype)
    int4 = families.read_shape(GOLDEN / name).nbytes(dtype, QUANTISATIONS["int4"])
    assert shape.weight_bytes(dtype.itemsize, int4=True) == int4
    model = load_model(GOLDEN / name, dtype, torch.device("cpu"))
    assert shape.kv_bytes(dtype.itemsize) == model.kv_shape.bytes_per_token(dtype)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("family", NATIVE_TYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": None, "rope_scaling": YARN, "attention_bias": True},
        {"use_sliding_window": False, "sliding_window": 100, "num_key_value_heads": None},
    ],
)
def test_sizes_of_transformers_own_classes_are_nearly_the_models(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    shape = {
        "model_type": family,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 9999,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.5 if "glm" in family else None,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape | changes))
    ours, engines = read_shape(tmp_path), families.read_shape(tmp_path)
    assert ours.context == engines.positions
    assert ours.kv_bytes(2) == 2 * engines.layers * engines.kv_heads * engines.head_dim * 2
    assert ours.weight_bytes(2) == pytest.approx(engines.nbytes(torch.bfloat16), rel=0.002)
    int4 = engines.nbytes(torch.bfloat16, QUANTISATIONS["int4"])
    assert ours.weight_bytes(2, int4=True) == pytest.approx(int4, rel=0.004)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_quantised_already_is_sized_as_it_is_held(tmp_path: Path, name: str, tied: bool) -> None:
    shape = {
        "model_type": "qwen2",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "vocab_size": 9999,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "quantization_config": FORMATS[name][0],
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    ours, engines, form = read_shape(tmp_path), families.read_shape(tmp_path), FORMATS[name][2]
    stored, _ = read_quantization(tmp_path, None)
    assert stored is not None
    held = engines.nbytes(torch.bfloat16, form, form if stored.head else Linear)
    assert ours.weight_bytes(2) == pytest.approx(held, rel=0.004)
    assert (ours.stored is None) == (stored.quantization is None)


@pytest.mark.parametrize("bits", [4, 8])
def test_chatglms_own_quantised_files_are_sized_as_they_are_held(tmp_path: Path, bits: int) -> None:
    document = json.loads((GOLDEN / "chatglm3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"quantization_bit": bits}))
    held = families.read_shape(tmp_path).nbytes(torch.bfloat16, QUANTISATIONS[f"int{bits}"], Linear)
    assert read_shape(tmp_path).weight_bytes(2) == held


def test_what_is_quantised_already_is_not_advised_to_be(tmp_path: Path) -> None:
    document = json.loads((GOLDEN / "chatglm3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"quantization_bit": 8}))
    status, text = run("--model", str(tmp_path), "--gpu-memory", "0.5")
    assert status == 1
    assert "GiB  int8" in text
    assert text.splitlines()[-2] == "It does not fit a GPU of 0.5 GiB in int8."
    assert text.splitlines()[-1].startswith("Nor does it with `up --max-running 1`, which takes")
    shape = replace(CHATGLM3_6B, stored="int4")
    assert re.fullmatch(r"It does with `up --max-running \d+`.", advice(6, shape))


@pytest.mark.parametrize(
    "changes",
    [{"quantization_config": "awq"}, {"rope_scaling": "yarn"}, {"partial_rotary_factor": "half"}],
)
def test_values_of_another_kind(tmp_path: Path, changes: dict[str, object]) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "hidden_act": "silu"}
    counts = dict.fromkeys(("num_hidden_layers", "vocab_size", "max_position_embeddings"), 8)
    (tmp_path / "config.json").write_text(json.dumps(shape | counts | changes))
    with pytest.raises(SizingError, match=r"config\.json: not a checkpoint that can be sized: "):
        read_shape(tmp_path)


@pytest.mark.parametrize("key", ["num_local_experts", "n_routed_experts", "kv_lora_rank"])
def test_a_model_with_experts_is_not_sized_as_one_without(tmp_path: Path, key: str) -> None:
    config = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "x", key: 8}))
    with pytest.raises(SizingError, match="its model_type is 'x'"):
        read_shape(tmp_path)


def test_figures_are_the_engines_own() -> None:
    assert backend.HOPPER_BLOCK_TOKENS == sizing.BLOCK_TOKENS
    assert sizing.INT4_GROUP == GROUP
    assert sizing.GPU_SHARE == capacity.GPU_SHARE
    gpu_defaults = {option.name: option.gpu for option in OPTIONS}
    assert gpu_defaults["max_running"] == sizing.MAX_RUNNING
    assert sizing.LOGITS_COPIES == capacity.LOGITS_COPIES
    assert sizing.GRAPH_BYTES == capacity.GRAPH_BYTES
    assert gpu_defaults["burst_tokens"] == sizing.STEP_TOKENS
    decodes = graphs.decode_sizes(sizing.MAX_RUNNING)
    prompts = graphs.prompt_sizes(sizing.STEP_TOKENS)
    twice = [rows for rows in prompts if rows <= HOPPER_ROWS]
    assert (1 + len(PlainRules)) * len(decodes) + len(prompts) + len(twice) == sizing.GRAPHS
    assert sizing.CONTEXT_BYTES == capacity.CONTEXT_BYTES


def test_chatglm3_on_24_gib() -> None:
    found = size(CHATGLM3_6B, gpu_bytes=24 * GIB, item_bytes=2)
    assert found.kv_token == 28_672
    assert found.weights == pytest.approx(11.63 * GIB, rel=0.01)
    assert found.weights + found.steps + found.kv_cache <= 24 * GIB
    assert 150 < found.sequences(2048, 512) < 200
    assert size(CHATGLM3_6B, gpu_bytes=80 * GIB, item_bytes=2).sequences(1024, 512) == 512
    assert size(CHATGLM3_6B, gpu_bytes=12 * GIB, item_bytes=2).blocks == 0


def test_the_command(tmp_path: Path) -> None:
    status, text = run("--model", str(GOLDEN / "chatglm3"), "--gpu-memory", "24")
    assert status == 0
    assert "weights" in text
    assert "sequences at once" in text
    status, text = run("--model", str(tmp_path), "--gpu-memory", "24")
    assert (status, "config.json: No such file" in text) == (1, True)


def advice(gpu_gib: float, shape: Shape = CHATGLM3_6B, max_running: int = 512) -> str:
    return sizing.advice(shape, gpu_bytes=int(gpu_gib * GIB), item_bytes=2, max_running=max_running)


def test_where_steps_are_too_large_fewer_sequences_are_advised() -> None:
    demo = read_shape(GOLDEN / "chatglm3")
    one, most = demo.step_bytes(2, 1), demo.step_bytes(2, 2**20)
    found = re.fullmatch(
        r"It does with `up --max-running (\d+)`.", advice((one + most) / 2 / GIB, demo, 2**20)
    )
    assert found
    assert 2**18 < int(found[1]) < 2**20
    gpu = int((one + most) / 2)
    for running, fits in ((int(found[1]), True), (int(found[1]) + 1, False)):
        blocks = size(demo, gpu_bytes=gpu, item_bytes=2, max_running=running).blocks
        assert (blocks >= running) == fits


def test_where_weights_are_too_large_int4_is_advised() -> None:
    assert advice(12) == "It does with `up --quantization int4`, whose weights take 3.46 GiB."
    assert re.fullmatch(
        r"It does with `up --max-running \d+`, or with `up --quantization int4`, whose .*", advice(14)
    )
    assert re.fullmatch(r"It does with `up --quantization int4 --max-running \d+`, whose .*", advice(6))


def test_where_nothing_helps_no_flag_is_advised() -> None:
    status, text = run("--model", str(GOLDEN / "chatglm3"), "--gpu-memory", "0.5")
    assert status == 1
    assert text.splitlines()[-2:] == [
        "It does not fit a GPU of 0.5 GiB in bfloat16.",
        "Nor does it with `up --quantization int4 --max-running 1`, which takes 1.47 GiB without a KV cache.",
    ]


def test_a_name_of_the_hub_is_refused_as_up_does() -> None:
    with pytest.raises(SetupError) as refused:
        read_model_argument("THUDM/chatglm3-6b")
    told = str(refused.value)
    assert "hf download THUDM/chatglm3-6b" in told
    assert run("--model", "THUDM/chatglm3-6b", "--gpu-memory", "24") == (1, f"Error: {told}\n")


@pytest.mark.parametrize("document", ["[]", "{", '{"num_layers": 2}', '{"num_layers": "2"}'])
def test_what_is_no_checkpoint(tmp_path: Path, document: str) -> None:
    (tmp_path / "config.json").write_text(document)
    with pytest.raises(SizingError, match=r"config\.json: not "):
        read_shape(tmp_path)


def test_another_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    status, text = run("--model", str(tmp_path), "--gpu-memory", "24")
    assert status == 1
    assert "it has no 'num_attention_heads', and its model_type is 'llama'" in text


@pytest.mark.parametrize("memory", ["nan", "inf", "1e300", "0", "24GiB"])
def test_what_is_no_amount_of_memory(memory: str) -> None:
    status, text = run("--model", str(GOLDEN / "chatglm3"), "--gpu-memory", memory)
    assert (status, "--gpu-memory" in text) == (2, True)


def test_a_count_below_one(tmp_path: Path) -> None:
    good = json.loads((GOLDEN / "chatglm3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(good | {"num_layers": 0}))
    with pytest.raises(SizingError, match="0 is no count"):
        read_shape(tmp_path)
