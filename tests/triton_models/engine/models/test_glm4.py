"""GLM-4's shape against transformers' own implementation of it, on a checkpoint as published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GlmConfig, GlmForCausalLM

from tests.glm4_checkpoint import CONFIG, write_checkpoint
from tests.triton_models.engine.fake_model import ids, request, run
from triton_models.checkpoint import load_model, read_config
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

CPU = torch.device("cpu")
PROMPT = [332, 334, 337, 10, 300, 7, 422, 99, 338]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_qkv_bias": False, "multi_query_group_num": 4, "rope_ratio": 10000},  # as the 1M variant has them
    {"multi_query_attention": False, "kv_channels": 32, "hidden_size": 96, "rope_ratio": 1},
]


def native(tensors: dict[str, torch.Tensor], **changes: Any) -> GlmForCausalLM:
    """Return the reference: the published names and numbers put in transformers' words."""
    config = CONFIG | changes
    heads, width = config["num_attention_heads"], config["kv_channels"]
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else heads
    model = GlmForCausalLM(
        GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            max_position_embeddings=config["seq_length"],
            rms_norm_eps=config["layernorm_epsilon"],
            attention_bias=config["add_qkv_bias"],
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0 * config["rope_ratio"],
                "partial_rotary_factor": 0.5,
            },
            pad_token_id=0,
            attn_implementation="eager",
        )
    )
    state = {}
    for name, tensor in tensors.items():
        if "query_key_value" not in name:
            state[_renamed(name)] = tensor.float()
            continue
        before, _, kind = name.rpartition(".")
        prefix = _renamed(before.removesuffix("query_key_value"))
        parts = torch.split(tensor.float(), [heads * width, groups * width, groups * width])
        for letter, part in zip("qkv", parts, strict=True):
            state[f"{prefix}{letter}_proj.{kind}"] = part
    model.load_state_dict(state)
    return model.eval()


def _renamed(name: str) -> str:
    for published, own in (
        ("transformer.embedding.word_embeddings", "model.embed_tokens"),
        ("transformer.encoder.final_layernorm", "model.norm"),
        ("transformer.output_layer", "lm_head"),
        ("transformer.encoder.layers", "model.layers"),
        ("self_attention.dense", "self_attn.o_proj"),
        ("self_attention", "self_attn"),
        ("dense_h_to_4h", "gate_up_proj"),
        ("dense_4h_to_h", "down_proj"),
    ):
        name = name.replace(published, own)
    return name


@pytest.mark.parametrize("changes", VARIANTS)
def test_answers_and_probabilities_are_the_references(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = native(write_checkpoint(tmp_path, **changes), **changes)
    engine = Engine(load_model(tmp_path, torch.float32, CPU), EngineSettings(block_size=4))
    sampling = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5)
    engine.add(request("x", PROMPT, sampling))
    answer = run(engine)["x"]
    sequence = torch.tensor([PROMPT + ids(answer)])
    with torch.inference_mode():
        expected = reference(sequence).logits[0].log_softmax(-1)
    for at, output in enumerate(answer, start=len(PROMPT) - 1):
        assert output.logprobs is not None
        values, tokens = expected[at].topk(5)
        assert [token for token, _ in output.logprobs.top] == tokens.tolist()
        assert [value for _, value in output.logprobs.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_rotary_base_that_differs_is_seen(tmp_path: Path) -> None:
    """The reference above is one that a wrong `rope_ratio` would fail."""
    tensors = write_checkpoint(tmp_path)
    with torch.inference_mode():
        one, other = (native(tensors, rope_ratio=ratio)(torch.tensor([PROMPT])).logits for ratio in (500, 50))
    assert (one - other).abs().max() > 1e-2


def test_the_published_configuration_is_read(tmp_path: Path) -> None:
    published = {
        "num_layers": 40,
        "hidden_size": 4096,
        "ffn_hidden_size": 13696,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "padded_vocab_size": 151552,
        "seq_length": 131072,
    }
    write_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text(encoding="utf-8")
    for name, value in published.items():
        text = text.replace(f'"{name}": {CONFIG[name]},', f'"{name}": {value},')
    file.write_text(text, encoding="utf-8")
    config = read_config(tmp_path)
    assert {name: getattr(config, name) for name in published} == published
    assert (config.layernorm_epsilon, config.rope_ratio) == (1.5625e-07, 500)
    assert (config.multi_query_group_num, config.add_qkv_bias) == (2, True)
    assert config.nbytes(torch.bfloat16) == pytest.approx(18.8e9, rel=0.01)
