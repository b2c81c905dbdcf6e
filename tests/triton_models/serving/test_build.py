import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.triton_models.serving.conftest import GOLDEN, parameters
from tests.triton_models.serving.fakes import FakePbUtils
from triton_models.engine.settings import EngineSettings
from triton_models.errors import CheckpointError
from triton_models.serving.chat_text import load_text
from triton_models.serving.service import build_service, choose_dtype, engine_settings


def test_the_processor_computes_in_float32_unless_asked() -> None:
    assert choose_dtype("auto", torch.device("cpu"))[0] is torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu"))[0] is torch.bfloat16


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


def test_a_gpu_gets_larger_steps_unless_asked() -> None:
    on_gpu = engine_settings(parameters(max_running=7), torch.device("cuda:0"))
    assert (on_gpu.max_running, on_gpu.max_batched_tokens) == (7, 1024)
    assert (on_gpu.burst_tokens, on_gpu.burst_steps) == (4096, 4)
    assert engine_settings(parameters(max_running=7), torch.device("cpu")) == EngineSettings(max_running=7)
