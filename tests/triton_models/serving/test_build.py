import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.template_checkpoint import write_tokenizer
from tests.triton_models.native_checkpoint import write_native
from tests.triton_models.serving.conftest import GOLDEN, Served, parameters
from tests.triton_models.serving.fakes import FakePbUtils
from triton_models.engine import backend
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.models.positions import Interpolation, Rope
from triton_models.engine.ops_cpu import NotCompiledError
from triton_models.engine.settings import EngineSettings
from triton_models.errors import CheckpointError, EntryError, SettingsError
from triton_models.serving import build
from triton_models.serving.build import build_service, choose_dtype, engine_settings
from triton_models.serving.chat_text import load_text
from triton_models.serving.service import HEARTBEAT_S
from wire.options import OPTIONS


def test_the_cpu_computes_in_float32_unless_asked() -> None:
    assert choose_dtype("auto", torch.device("cpu"))[0] is torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu"))[0] is torch.bfloat16


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EntryError, match="device cuda:2: GPUs that torch can use: 2"):
        build_service(parameters(device="cuda:2"), FakePbUtils())


def no_compiler() -> None:
    raise NotCompiledError("no compiler")


def test_quantised_weights_on_a_cpu_need_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for wanted in ("auto", "float32"):
        assert choose_dtype(wanted, cpu, "int8")[0] is torch.float32
    with pytest.raises(SettingsError, match="int8 on a CPU needs dtype auto or float32"):
        choose_dtype("bfloat16", cpu, "int8")
    monkeypatch.setattr(build, "compiled", no_compiler)
    for wanted in ("auto", "float32"):
        with pytest.raises(SettingsError, match="int4 is not offered on this CPU: no compiler"):
            choose_dtype(wanted, cpu, "int4")


def test_stored_weights_are_served_where_their_products_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu, "int8", stored=True)[0] is torch.float32
    monkeypatch.setattr(build, "compiled", no_compiler)
    dtype, reason = choose_dtype("auto", cpu, "int4", stored=True)
    assert dtype is torch.float32
    assert reason == "int4 weights are expanded in each product, which is slow: no compiler"


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_gpu_that_only_emulates_bfloat16_gets_float16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # as torch says of Turing
    assert choose_dtype("auto", torch.device("cuda:1"))[0] is dtype


def test_fp8_is_for_gpus_that_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"fp8 needs a GPU of compute capability 8.9 .*, not cpu"):
        choose_dtype("auto", torch.device("cpu"), "fp8")
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    with pytest.raises(SettingsError, match="not cuda:0"):
        choose_dtype("auto", gpu, "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert choose_dtype("auto", gpu, "fp8")[0] is torch.bfloat16
    with pytest.raises(SettingsError, match="fp8 needs dtype auto or bfloat16"):
        choose_dtype("float16", gpu, "fp8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_model_is_served(quantization: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        built = build_service(parameters(quantization=quantization, kv_memory_gib=0.01), FakePbUtils())
    assert f"glm: weights in {quantization} take 0.00 GiB of cpu" in caplog.text
    built.start()
    try:
        assert Served(built).ask(max_tokens=3).wait().refusal is None
    finally:
        built.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_stay_so_and_answers_are_those_of_float32(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    for stored in (dtype, torch.float32):
        directory = shutil.copytree(GOLDEN, tmp_path / str(stored))
        tensors = load_file(GOLDEN / "model.safetensors")
        tensors = {name: each.to(dtype).to(stored) for name, each in tensors.items()}
        save_file(tensors, directory / "model.safetensors")
        with caplog.at_level(logging.INFO):
            built = build_service(parameters(directory, kv_memory_gib=0.01), FakePbUtils())
        assert f"glm: weights in {stored} take" in caplog.text
        built.start()
        try:
            asked = {"max_tokens": 60, "temperature": 0.9, "seed": 5, "logprobs": 3, "ignore_eos": True}
            answers.append(Served(built).ask(**asked).wait())
        finally:
            built.close()
    narrow, wide = answers
    assert narrow.text == wide.text
    # Of the last responses: where a machine is slow, others come before them.
    assert narrow.metas[-1].logprobs == wide.metas[-1].logprobs


def test_a_model_of_transformers_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_native(tmp_path, "gpt_neox")
    write_tokenizer(tmp_path)
    options = {"engine": "transformers", "kv_memory_gib": 0.01, "max_context": 128}
    with caplog.at_level(logging.INFO):
        built = build_service(parameters(tmp_path, **options), FakePbUtils())
    assert "glm: transformers' weights in torch.float32 take 0.00 GiB of cpu" in caplog.text
    assert "transformers' forward pass, and operations compiled for this CPU" in caplog.text
    built.start()
    try:
        assert Served(built).ask("the", raw=True, max_tokens=3, ignore_eos=True).wait().refusal is None
    finally:
        built.close()


@pytest.mark.parametrize(("small", "told", "threads"), [(True, False, 3), (False, False, 4), (True, True, 4)])
def test_a_small_model_leaves_a_core_to_what_serves_it(
    small: bool, told: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told:
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
    if not small:
        monkeypatch.setattr(build, "_SMALL_BYTES", 1)
    build_service(parameters(kv_memory_gib=0.01), FakePbUtils())
    assert used[-1] == threads


def test_a_model_of_transformers_is_not_quantised() -> None:
    with pytest.raises(SettingsError, match="quantization is not supported with engine transformers"):
        build_service(parameters(engine="transformers", quantization="int8"), FakePbUtils())


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_checkpoint_that_is_quantised_already_needs_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_compiled: bool
) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    config = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8")) | {"quantization_bit": 8}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(GOLDEN / "model.safetensors")
    ends = ("query_key_value.weight", "dense.weight", "h_to_4h.weight", "4h_to_h.weight")
    for name in [each for each in tensors if each.endswith(ends)]:
        scales = tensors[name].abs().amax(dim=1) / 127
        tensors[f"{name}_scale"] = scales.half()
        tensors[name] = (tensors[name] / scales[:, None]).round().to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    if not is_compiled:
        for module in (build, backend):
            monkeypatch.setattr(module, "compiled", no_compiler)
    with caplog.at_level(logging.INFO):
        built = build_service(parameters(tmp_path, kv_memory_gib=0.01), FakePbUtils())
    assert "glm: weights in int8 take 0.00 GiB of cpu" in caplog.text
    built.start()
    try:
        assert Served(built).ask(max_tokens=3).wait().refusal is None
    finally:
        built.close()
    with pytest.raises(CheckpointError, match="int8 already"):
        build_service(parameters(tmp_path, quantization="int4"), FakePbUtils())


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    config = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8")) | {"padded_vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(GOLDEN / "model.safetensors")
    for name in ("transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"):
        tensors[name] = tensors[name][:1000].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="belong together"):
        build_service(parameters(tmp_path), FakePbUtils())


def test_the_format_can_be_given_where_the_files_do_not_say(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.model"):
        shutil.copy(GOLDEN / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="format"):
        load_text(parameters(tmp_path))
    assert load_text(parameters(tmp_path, format="chatglm2")).format.name == "chatglm2"


def test_the_given_format_also_says_where_tokens_stand(tmp_path: Path) -> None:
    directory = tmp_path / "tuned"
    shutil.copytree(GOLDEN, directory, ignore=shutil.ignore_patterns("tokenizer_config.json"))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | {"rope_ratio": 16}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, _ = build._read_own(parameters(directory, format="chatglm2"), torch.device("cpu"))
    assert isinstance(model, Decoder)
    assert model.config.rope == Rope(share=0.5, base=10_000.0, scaling=Interpolation(factor=16))


def test_a_gpu_gets_larger_steps_unless_asked() -> None:
    on_gpu = engine_settings(parameters(max_running=7), torch.device("cuda:0"))
    assert (on_gpu.max_running, on_gpu.max_batched_tokens) == (7, 1024)
    assert (on_gpu.burst_tokens, on_gpu.burst_steps) == (2048, 4)
    on_cpu = engine_settings(parameters(max_running=7), torch.device("cpu"))
    assert on_cpu == EngineSettings(max_running=7)


def test_the_default_that_is_said_is_the_one_that_applies() -> None:
    (option,) = (option for option in OPTIONS if option.name == "heartbeat_s")
    assert float(option.default) == HEARTBEAT_S
