"""Families that only transformers implements, in our scheduler: answers are those of its own `generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.native_checkpoint import write_native
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.transformers_checkpoint import load_transformers

CPU = torch.device("cpu")
PROMPT = [3, 300, 17, 99, 250, 41, 41, 8, 160, 5, 77]
OTHER = [*PROMPT[:9], 12, 200, 31]
ANSWER = 16
SMALL = EngineSettings(max_running=4, max_batched_tokens=7, block_size=4, kv_blocks=60)
"""Prompts take several steps, beside decodes."""

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + number / 8 for number in range(8)],
    "long_factor": [4.0 + number for number in range(8)],
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
        "head_dim": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "gemma": {},
    "gpt2": {"n_inner": 96},
    "gpt_neox": {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
    "granite": {
        "attention_multiplier": 0.4, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
    },
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "phi": {"hidden_size": 96, "head_dim": 24, "partial_rotary_factor": 0.5},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "starcoder2": {"use_bias": True},
}  # fmt: skip
"""By what is special: shapes of heads, positions, scales, experts, where the base model's layers are."""


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The greedy answer by transformers."""
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
    )  # fmt: skip
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(tmp_path: Path, family: str) -> None:
    reference = write_native(tmp_path, family, **FAMILIES[family])
    model = load_transformers(tmp_path, torch.float32, CPU, max_context=64)
    engine = Engine(model, SMALL)
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER)
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=ANSWER)
    engine.add(request("a", PROMPT, greedy), request("b", OTHER, greedy), request("seeded", PROMPT, seeded))
    together = run(engine)
    assert ids(together["a"]) == generated(reference, PROMPT)
    assert ids(together["b"]) == generated(reference, OTHER)
    engine.add(request("again", PROMPT, seeded))
    alone = run(engine)
    assert alone["again"][-1].cached_tokens == 8
    assert ids(alone["again"]) == ids(together["seeded"])
