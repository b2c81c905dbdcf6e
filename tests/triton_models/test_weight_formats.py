"""Quantised checkpoints, packed here word by word from the formats' published layouts.

Layouts: GPTQ and AWQ as in AutoGPTQ's and AutoAWQ's `QuantLinear` / `WQLinear_GEMM`; compressed-tensors as in
its `pack_to_int32`; ChatGLM as in `quantization.py` beside `modeling_chatglm.py`; fp8 as in transformers'
`FP8Linear` and compressed-tensors' `float-quantized`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.triton_models.engine.models.whole_pass import whole_pass
from tests.triton_models.native_checkpoint import write_bloom, write_native
from triton_models import checkpoint
from triton_models.checkpoint import load_model, read_quantization
from triton_models.engine.linear import Linear
from triton_models.engine.models import CausalModel, Rotary
from triton_models.engine.quantised import Int4Linear, Int8Linear, QuantisedLinear
from triton_models.errors import CheckpointError, UnsupportedArchitectureError

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden"
GROUP = 128
MATRIX = "model.layers.0.self_attn.q_proj"
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix by the last parts of their names, and what they mean, in float32."""


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack [n, 8 m] numbers of 4 bits into [n, m] int32: number `order[i]` of eight is at bit 4 * i."""
    total = sum(numbers.long()[:, place::8] << (4 * bit) for bit, place in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def numbers_for(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor, Tensor, Callable[..., Tensor]]:
    """Random 4-bit weights, scales and zero points of [rows, groups], and what repeats those for columns."""
    groups = -(-columns // group)
    numbers = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, groups) * 0.03 + 0.001).half()
    zeros = torch.randint(1, 16, (rows, groups))
    return numbers, scales, zeros, lambda each: each.repeat_interleave(group, 1)[:, :columns]


def gptq(weight: Tensor, *, version: int = 1, symmetric: bool = False, group: int = GROUP) -> Packed:
    rows, columns = weight.shape
    group = columns if group < 0 else group
    numbers, scales, zeros, wide = numbers_for(rows, columns, group)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    parts = {
        "qweight": words(numbers).T,
        "qzeros": words(zeros.T - (1 if version == 1 else 0)),
        "scales": scales.T,
        "g_idx": (torch.arange(columns) // group).int(),
    }
    return parts, (numbers - wide(zeros)) * wide(scales.float())


def awq(weight: Tensor) -> Packed:
    numbers, scales, zeros, wide = numbers_for(len(weight), weight.shape[1], GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(numbers.T, order), "qzeros": words(zeros.T, order), "scales": scales.T}
    return parts, (numbers - wide(zeros)) * wide(scales.float())


def pack_quantized(weight: Tensor, *, symmetric: bool, group: int = GROUP) -> Packed:
    rows, columns = weight.shape
    numbers, scales, zeros, wide = numbers_for(rows, columns, columns if group < 0 else group)
    scales = scales.bfloat16()
    parts = {
        "weight_packed": words(numbers),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    else:
        parts["weight_zero_point"] = words(zeros.T).T
    return parts, (numbers - wide(zeros)) * wide(scales.float())


def int_quantized(weight: Tensor) -> Packed:
    numbers = torch.randint(-128, 128, weight.shape).to(torch.int8)
    scales = (torch.rand(len(weight), 1) * 0.002 + 1e-4).half()
    return {"weight": numbers, "weight_scale": scales}, numbers * scales.float()


def float_quantized(weight: Tensor, *, whole: bool) -> Packed:
    numbers = (weight * 300).to(torch.float8_e4m3fn)
    scales = torch.rand(()).float() * 0.01 if whole else torch.rand(len(weight), 1).bfloat16() * 0.01
    parts = {"weight": numbers, "weight_scale": scales, "input_scale": torch.ones(1)}
    return parts, numbers.float() * scales.float()


def fp8_blocks(weight: Tensor) -> Packed:
    numbers = (weight * 300).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) * 0.01
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * wide


def chatglm(weight: Tensor, *, bits: int) -> Packed:
    half = 2 ** (bits - 1)
    numbers = torch.randint(-half, half, weight.shape)
    scales = (torch.rand(len(weight)) * 0.1 / half + 1e-4).half()
    stored = numbers.to(torch.int8)
    if bits == 4:
        stored = (((numbers[:, 0::2] & 15) << 4) | (numbers[:, 1::2] & 15)).to(torch.uint8).view(torch.int8)
    return {"weight": stored, "weight_scale": scales}, numbers * scales.float()[:, None]


def tensors_config(layout: str, bits: int, kind: str, strategy: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
PACKED = tensors_config("pack-quantized", 4, "int", "group", group_size=128)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed], type[Linear]]] = {
    "gptq": (GPTQ, gptq, Int4Linear),
    "gptq symmetric": (GPTQ | {"sym": True}, lambda each: gptq(each, symmetric=True), Int4Linear),
    "gptq rows": (GPTQ | {"group_size": -1}, lambda each: gptq(each, group=-1), Int4Linear),
    "gptq 256": (GPTQ | {"group_size": 256}, lambda each: gptq(each, group=256), Int4Linear),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda each: gptq(each, version=2), Int4Linear),
    "awq": (AWQ, awq, Int4Linear),
    "packed": (PACKED, lambda each: pack_quantized(each, symmetric=True), Int4Linear),
    "packed rows": (
        tensors_config("pack-quantized", 4, "int", "channel"),
        lambda each: pack_quantized(each, symmetric=True, group=-1),
        Int4Linear,
    ),
    "packed with zeros": (
        tensors_config("pack-quantized", 4, "int", "group", group_size=128, symmetric=False),
        lambda each: pack_quantized(each, symmetric=False),
        Int4Linear,
    ),
    "int8": (tensors_config("int-quantized", 8, "int", "channel"), int_quantized, Int8Linear),
    "float rows": (
        tensors_config("float-quantized", 8, "float", "channel"),
        lambda each: float_quantized(each, whole=False),
        Linear,
    ),
    "float whole": (
        tensors_config("float-quantized", 8, "float", "tensor"),
        lambda each: float_quantized(each, whole=True),
        Linear,
    ),
    "fp8": ({"quant_method": "fp8"}, lambda each: float_quantized(each, whole=True), Linear),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks, Linear),
}


def configure(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(raw), encoding="utf-8")


def convert(directory: Path, pack: Callable[[Tensor], Packed], head: str = "lm_head.weight") -> Path:
    """Replace the matrices in `directory` but the head; return a directory with what they mean instead."""
    plain = directory.with_name("plain")
    shutil.copytree(directory, plain)
    torch.manual_seed(3)
    packed, dense = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if tensor.dim() < 2 or "embed" in name or name == head:
            packed[name] = dense[name] = tensor
            continue
        parts, dense[name] = pack(tensor)
        packed |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(packed, directory / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    return plain


def written(tmp_path: Path, name: str, family: str = "qwen2", **changes: Any) -> tuple[Path, Path]:
    directory = tmp_path / "packed"
    if family == "bloom":
        write_bloom(directory, hidden_size=128, **changes)
    else:
        shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
        write_native(directory, family, **shape | changes)
    config, pack, _ = FORMATS[name]
    plain = convert(directory, pack)
    configure(directory, quantization_config=config)
    return directory, plain


def matrices(model: CausalModel) -> list[Linear]:
    """Return all matrices but the head."""
    found: list[Linear] = []

    def note(matrix: Linear) -> Linear:
        found.append(matrix)
        return matrix

    model.convert(note)
    return found[:-1]


def same(directory: Path, plain: Path, form: type[Linear]) -> None:
    """Check that both directories hold the same weights, to the last bit, and answer alike."""
    model, reference = (load_model(each, torch.float32, CPU) for each in (directory, plain))
    for mine, theirs in zip(matrices(model), matrices(reference), strict=True):
        assert type(mine) is form
        found = mine.dense(0, len(mine.weight)) if isinstance(mine, QuantisedLinear) else mine.weight
        assert torch.equal(found, theirs.weight)
    assert type(model.head) is Linear
    tokens = [5, 9, 200, 31, 7]
    torch.testing.assert_close(whole_pass(model, tokens), whole_pass(reference, tokens))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_mean_what_the_format_says(tmp_path: Path, name: str) -> None:
    same(*written(tmp_path, name), FORMATS[name][2])


@pytest.mark.parametrize("family", ["glm4", "bloom"])
@pytest.mark.parametrize("name", ["gptq", "awq", "int8", "fp8"])
def test_other_families(tmp_path: Path, name: str, family: str) -> None:
    same(*written(tmp_path, name, family), FORMATS[name][2])


def add_biases(directory: Path, value: float) -> None:
    """Add a bias to each GPTQ matrix that has none."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tuple(tensors.items()):
        stem, _, suffix = name.rpartition(".")
        if suffix == "scales":
            tensors.setdefault(f"{stem}.bias", torch.full((tensor.shape[1],), value).half())
    save_file(tensors, file)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_gptq_files_may_have_biases_of_0_that_the_model_has_not(tmp_path: Path, family: str) -> None:
    directory, plain = written(tmp_path, "gptq", family)
    add_biases(directory, 0)
    same(directory, plain, Int4Linear)


def test_gptq_biases_that_the_model_has_not_and_that_change_answers(tmp_path: Path) -> None:
    directory, _ = written(tmp_path, "gptq", "llama")
    add_biases(directory, 0.5)
    with pytest.raises(CheckpointError, match=r"matrix '.*' \(GPTQ\) has a bias, and the model has none"):
        load_model(directory, torch.float32, CPU)


@pytest.mark.parametrize(("bits", "form"), [(4, Int4Linear), (8, Int8Linear)])
@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_chatglms_own_files(tmp_path: Path, name: str, bits: int, form: type[Linear]) -> None:
    directory = tmp_path / name
    shutil.copytree(GOLDEN / name, directory)
    plain = convert(directory, lambda each: chatglm(each, bits=bits), "transformer.output_layer.weight")
    configure(directory, quantization_bit=bits)
    same(directory, plain, form)


@pytest.mark.parametrize("name", ["gptq", "packed with zeros", "float rows"])
def test_a_matrixs_tensors_may_be_in_different_shards(tmp_path: Path, name: str) -> None:
    directory, plain = written(tmp_path, name)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number in range(3):
        part = {key: each for turn, (key, each) in enumerate(sorted(tensors.items())) if turn % 3 == number}
        save_file(part, directory / f"{number}.safetensors")
        places |= dict.fromkeys(part, f"{number}.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    same(directory, plain, FORMATS[name][2])


@pytest.mark.parametrize("name", ["gptq", "int8", "fp8"])
def test_sizes_are_what_is_allocated(tmp_path: Path, name: str) -> None:
    directory, _ = written(tmp_path, name, tie_word_embeddings=False)
    filled: list[tuple[int, int]] = []
    model = load_model(directory, torch.bfloat16, CPU, lambda *counts: filled.append(counts))
    assert filled[-1][0] == filled[-1][1]
    assert isinstance(model.positions, Rotary)
    assert model.nbytes == filled[-1][1] + 2 * model.positions.cos.nbytes


def test_in_16_bits_scales_are_rounded_as_the_products_take_them(tmp_path: Path) -> None:
    directory, plain = written(tmp_path, "gptq")
    model, reference = load_model(directory, torch.bfloat16, CPU), load_model(plain, torch.float32, CPU)
    for mine, theirs in zip(matrices(model), matrices(reference), strict=True):
        assert isinstance(mine, Int4Linear)
        assert mine.scales.dtype == torch.bfloat16
        scales = (theirs.weight.abs().amax(dim=1, keepdim=True) / 8).expand_as(theirs.weight)
        errors = (mine.dense(0, len(mine.weight)).float() - theirs.weight).abs()
        assert (errors <= 0.2 * scales).all()


def test_fp8_weights_may_be_quantised_while_they_are_expanded(tmp_path: Path) -> None:
    directory, plain = written(tmp_path, "fp8")
    model, reference = (
        load_model(each, torch.float32, CPU, quantization="int8") for each in (directory, plain)
    )
    for mine, theirs in zip(matrices(model), matrices(reference), strict=True):
        assert torch.equal(mine.weight, theirs.weight)


def test_the_option_may_be_left_out_or_must_agree(tmp_path: Path) -> None:
    directory, _ = written(tmp_path, "gptq")
    assert read_quantization(directory, "int4")[1] == read_quantization(directory, None)[1] == "int4"
    with pytest.raises(CheckpointError, match=r"weights are int4 already \(GPTQ\); leave out .* not int8"):
        load_model(directory, torch.float32, CPU, quantization="int8")


def test_one_that_does_not_fit_is_refused_with_its_real_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = written(tmp_path, "gptq")
    monkeypatch.setattr(checkpoint, "total_bytes", lambda _device: 1000)
    with pytest.raises(CheckpointError, match=r"GiB in int4, .* its weights are int4 already"):
        load_model(directory, torch.float32, CPU)


COMPRESSED = PACKED["config_groups"]["group_0"]


def rotated(*places: str) -> dict[str, Any]:
    """A `transform_config` as compressed-tensors writes it."""
    apply = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    return {"transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": apply}}}}


@pytest.mark.parametrize(
    "transforms", [rotated("weight_input", "weight_output"), {"transform_config": {}, "rotation": None}]
)
def test_rotations_that_the_weights_hold_already_need_nothing(
    tmp_path: Path, transforms: dict[str, Any]
) -> None:
    directory, plain = written(tmp_path, "packed")
    configure(directory, quantization_config=FORMATS["packed"][0] | transforms)
    same(directory, plain, Int4Linear)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        (GPTQ | {"bits": 8}, "bits 8"),
        (GPTQ | {"desc_act": True}, "desc_act True"),
        (GPTQ | {"group_size": 64}, "group_size 64, which is no multiple of 128"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"modules_to_not_convert": ["mlp"]}, "leaving 'mlp' as it is"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"ignore": ["lm_head", MATRIX]}, f"leaving '{MATRIX}' as it is"),
        (PACKED | {"config_groups": {"a": COMPRESSED, "b": COMPRESSED}}, "anything but one group"),
        (tensors_config("pack-quantized", 4, "int", "group", group_size=32), "group_size 32"),
        (tensors_config("pack-quantized", 4, "int", "group", group_size=128, actorder="group"), "actorder"),
        (tensors_config("pack-quantized", 3, "int", "group", group_size=128), "'pack-quantized' with 3 bits"),
        (tensors_config("nvfp4-pack-quantized", 4, "float", "group"), "'nvfp4-pack-quantized' with 4 bits"),
        (tensors_config("int-quantized", 8, "int", "channel", symmetric=False), "'int-quantized' with 8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        (PACKED | rotated("weight_input", "input"), "transform_config"),
        (GPTQ | rotated("k_cache"), "transform_config"),
        (AWQ | {"transform_config": {"config_groups": {"R": {}}}}, "transform_config"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
    ],
)
def test_what_cannot_be_read_is_refused_before_reading(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    write_native(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    configure(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedArchitectureError, match=rf"{named}.*not supported; what would work: GPTQ"):
        load_model(tmp_path, torch.float32, CPU)


def test_other_bits_of_chatglm_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "chatglm3", tmp_path / "model")
    configure(tmp_path / "model", quantization_bit=3)
    with pytest.raises(UnsupportedArchitectureError, match="quantization_bit 3 is not supported"):
        load_model(tmp_path / "model", torch.float32, CPU)


@pytest.mark.parametrize("value", [[], [128], [0, 128], "128"])
def test_blocks_that_make_no_sense(tmp_path: Path, value: object) -> None:
    write_native(tmp_path, "llama")
    configure(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": value})
    with pytest.raises(CheckpointError, match="weight_block_size must be two sizes"):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("scales", None, rf"tensor '{MATRIX}\.scales' is missing"),
        ("g_idx", lambda each: each.flip(0), "another order than that of their groups"),
        ("qweight", lambda each: each.long(), "is torch.int64, not int32"),
        ("qweight", lambda each: each[:, :8], "has scales of shape"),
        ("scales", lambda each: each / 0, "has scales that are not finite"),
    ],
)
def test_tensors_that_do_not_fit_the_format_are_named(
    tmp_path: Path, suffix: str, change: Callable[[Tensor], Tensor] | None, words: str
) -> None:
    directory, _ = written(tmp_path, "gptq", intermediate_size=128)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(f"{MATRIX}.{suffix}")
    if suffix == "g_idx":
        tensor = torch.arange(len(tensor)).int()
    if change is not None:
        tensors[f"{MATRIX}.{suffix}"] = change(tensor).contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        load_model(directory, torch.float32, CPU)
