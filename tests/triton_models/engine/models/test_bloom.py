"""BLOOM against transformers' own implementation of it: prompts in chunks, and decodes over blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.models.whole_pass import whole_passes
from tests.triton_models.native_checkpoint import write_bloom
from triton_models.checkpoint import load_model
from triton_models.engine import ops_torch
from triton_models.engine.engine import Engine
from triton_models.engine.models import Alibi
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

CPU = torch.device("cpu")
PROMPT = [3, 300, 17, 99, 250, 41, 41, 8, 160, 5, 77]
ANSWER = 24
CASES: list[dict[str, Any]] = [
    {},
    {"n_head": 6, "hidden_size": 120},  # no power of two: slopes of two kinds
    {"n_head": 4, "hidden_size": 64, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
]


def load(directory: Path, quantization: str | None = None) -> Decoder:
    return load_model(directory, torch.float32, CPU, quantization=quantization)


@pytest.mark.parametrize("changes", CASES)
def test_logits_are_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = write_bloom(tmp_path, **changes)
    tokens = [(7 * number) % 320 for number in range(100)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(whole_passes(load(tmp_path), tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("budget", [16, 500])
def test_greedy_answers_are_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], budget: int
) -> None:
    """Two at a time, prompts in chunks or whole, and biases of a few rows at a time."""
    reference = write_bloom(tmp_path, **changes)
    monkeypatch.setattr(ops_torch, "_BIASES", 700)
    prompts = [PROMPT, PROMPT[:4] * 9]
    settings = EngineSettings(block_size=4, max_running=4, max_batched_tokens=budget)
    engine = Engine(load(tmp_path), settings)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=2)
        engine.add(request(f"{number}", prompt, sampling))
    answers = run(engine)
    for number, prompt in enumerate(prompts):
        answer = answers[f"{number}"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids(answer)])).logits[0, len(prompt) - 1 : -1]
        assert ids(answer) == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values.tolist()
        found = [each.logprobs.logprob for each in answer if each.logprobs is not None]
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14, 16, 25, 32, 40, 112])
def test_slopes_are_transformers(tmp_path: Path, heads: int) -> None:
    write_bloom(tmp_path, n_head=heads, hidden_size=heads, n_layer=1)
    found = load(tmp_path).positions
    assert isinstance(found, Alibi)
    biases = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    torch.testing.assert_close(found.slopes, biases[:, 0, 1])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_answers_are_those_of_the_quantised_weights(tmp_path: Path, name: str) -> None:
    write_bloom(tmp_path)
    quantised, dense = load(tmp_path, name), load(tmp_path)
    for mine, theirs in zip(quantised.layers, dense.layers, strict=True):
        for field in ("qkv", "attention_out", "up", "down"):
            matrix, plain = getattr(mine, field), getattr(theirs, field)
            assert isinstance(matrix, QUANTISATIONS[name])
            rounded = matrix.dense(0, len(plain.weight))
            torch.testing.assert_close(rounded, plain.weight, atol=0.05, rtol=0)
            plain.weight.copy_(rounded)
    answers = []
    for model in (quantised, dense):
        engine = Engine(model, EngineSettings(block_size=4))
        engine.add(request("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=ANSWER)))
        answers.append(ids(run(engine)["x"]))
    assert answers[0] == answers[1]
