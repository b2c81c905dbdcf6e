"""Checkpoints for transformers' own classes: what cannot run in our scheduler is refused, and is named."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_models.native_checkpoint import write_native
from triton_models import transformers_checkpoint
from triton_models.engine.models.transformers_model import TransformersModel
from triton_models.errors import CheckpointError, UnsupportedArchitectureError
from triton_models.transformers_checkpoint import load_transformers

CPU = torch.device("cpu")
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def load(directory: Path, max_context: int | None = None) -> TransformersModel:
    return load_transformers(directory, torch.float32, CPU, max_context=max_context)


def configure(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(document | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("bert", {"is_decoder": False}, "BertLMHeadModel: its attention is not causal"),
        ("bloom", {}, "BloomForCausalLM: transformers offers no way to give it another attention"),
        ("bart", {"d_model": 64}, "BartForCausalLM: transformers offers no way"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "GPTNeoForCausalLM: transformers offers no way"),
        ("gemma2", {}, "Gemma2ForCausalLM: attention with softcap is not supported"),
        ("gpt_oss", {"num_local_experts": 4}, "GptOssForCausalLM: attention with s_aux is not supported"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention", "conv"]},
            "Lfm2ForCausalLM: its 3 layers attend 1 times, and each must once",
        ),
        ("mamba", {}, "MambaForCausalLM: it keeps a state of its own"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
)
def test_what_our_attention_does_not_do_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    write_native(tmp_path, family, **changes)
    with pytest.raises(UnsupportedArchitectureError, match=named):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mistral", {"sliding_window": 128}, "sliding_window 128"),
        ("phimoe", {"sliding_window": 128, "num_local_experts": 4}, "sliding_window 128"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 128, "num_experts": 4},
            "sliding_window 128",
        ),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
            "original_max_position_embeddings 128",
        ),
    ],
)
def test_what_changes_with_length_is_served_up_to_there(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    write_native(tmp_path, family, **changes)
    with pytest.raises(
        UnsupportedArchitectureError,
        match=f"{named} is not supported with a context of 256 tokens; max_context 128 is",
    ):
        load(tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match="129 tokens"):
        load(tmp_path, max_context=129)
    assert load(tmp_path, max_context=128).max_positions == 256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"model_type": "novel", "auto_map": {"AutoConfig": "novel.Novel"}},
            "'novel' is none of transformers",
        ),
        ({"model_type": "t5"}, "'t5' is no causal language model"),
        ({"model_type": "gemma3", "text_config": {}}, "'gemma3' takes more than text"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
    ],
)
def test_what_is_no_model_of_text_is_refused_by_its_configuration(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    (tmp_path / "novel.py").write_text("raise SystemExit('remote code ran')", encoding="utf-8")
    configure(tmp_path, **{"model_type": "llama"} | changes)
    with pytest.raises(UnsupportedArchitectureError, match=named):
        load(tmp_path)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_checkpoint, "total_bytes", lambda _device: 8 * 2**30)
    configure(tmp_path, model_type="gpt_neox", hidden_size=6144, num_hidden_layers=44, vocab_size=50432)
    with pytest.raises(CheckpointError, match=r"takes 76\.\d GiB in torch.float32, and cpu has 8.0"):
        load(tmp_path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    write_native(tmp_path, "gpt_neox", num_hidden_layers=2)
    configure(tmp_path, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"gpt_neox\.layers\.2\.[a-z_.]+' is missing \(12 in all\)"):
        load(tmp_path)


def test_only_tensors_are_unpickled(tmp_path: Path) -> None:
    write_native(tmp_path, "gpt_neox")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match="transformers cannot read it"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("layers.1.mlp", lambda output: output + output.roll(1, dims=1)),  # as convolutions do
        ("rotary_emb", lambda output: [each.sort(dim=1).values for each in output]),  # of the row's place
    ],
)
def test_rows_that_depend_on_others_are_refused(
    tmp_path: Path, part: str, changed: Callable[[Any], Any]
) -> None:
    write_native(tmp_path, "gpt_neox")
    model = load(tmp_path)
    module = model._base.get_submodule(part)
    module.register_forward_hook(lambda _module, _inputs, output: changed(output))
    with (
        torch.inference_mode(),
        pytest.raises(UnsupportedArchitectureError, match="GPTNeoXForCausalLM: a token's row depends on"),
    ):
        model.check()
