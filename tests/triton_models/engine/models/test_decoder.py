"""Every family against transformers' own implementation of it: prompts in chunks, and decodes over blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.models.whole_pass import WholeSequence, whole_passes
from tests.triton_models.native_checkpoint import write_native
from triton_models.checkpoint import load_model
from triton_models.directory import BLOOM_TYPE, NATIVE_TYPES
from triton_models.engine import ops_torch
from triton_models.engine.engine import Engine
from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, Next, Norm, Rotary
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

CPU = torch.device("cpu")
PROMPT = [3, 300, 17, 99, 250, 41, 41, 8, 160, 5, 77]
ANSWER = 24

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("glm", {}),
    ("glm", {"attention_bias": False, "num_key_value_heads": 4, "head_dim": 32}),
    ("glm4", {"attention_bias": True}),
    ("glm4", {"attention_bias": False}),
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4, "attention_bias": True}),
    ("mistral", {"head_dim": 32}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen2", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0, "attention_factor": 1.2}}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    (BLOOM_TYPE, {}),
    (BLOOM_TYPE, {"n_head": 6, "hidden_size": 120}),  # no power of two: slopes of two kinds
    (
        BLOOM_TYPE,
        {"n_head": 4, "hidden_size": 64, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
]


def test_every_family_is_compared() -> None:
    assert {family for family, _ in CASES} == {*NATIVE_TYPES, BLOOM_TYPE}


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_are_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    reference = write_native(tmp_path, family, **changes)
    model = load_model(tmp_path, torch.float32, CPU)
    tokens = [(7 * number) % 320 for number in range(100)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(whole_passes(model, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("budget", [16, 500])
def test_greedy_answers_are_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], budget: int
) -> None:
    """Two at a time, prompts in chunks or whole, and biases of a few rows at a time."""
    reference = write_native(tmp_path, family, **changes)
    monkeypatch.setattr(ops_torch, "_BIASES", 700)
    prompts = [PROMPT, PROMPT[:4] * 9]
    settings = EngineSettings(block_size=4, max_running=4, max_batched_tokens=budget)
    engine = Engine(load_model(tmp_path, torch.float32, CPU), settings)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=2)
        engine.add(request(f"{number}", prompt, sampling))
    answers = run(engine)
    for number, prompt in enumerate(prompts):
        answer = answers[f"{number}"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids(answer)])).logits[0, len(prompt) - 1 : -1]
        assert ids(answer) == logits.argmax(-1).tolist()
        found = [each.logprobs.logprob for each in answer if each.logprobs is not None]
        assert found == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-4)


class Foretold(WholeSequence):
    """Holds that what was told ahead comes next: a product with that matrix, of that norm of the result."""

    def __init__(self, length: int, kv_heads: int) -> None:
        super().__init__(length, kv_heads)
        self.count = 0
        self._ahead: tuple[Tensor, Next] | None = None

    def _comes(self, inputs: Tensor, matrix: Linear, norm: Norm | None) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            assert inputs is ahead[0]
            assert matrix is ahead[1].matrix
            assert norm is ahead[1].norm
            self.count += 1

    def _gives(self, result: Tensor, then: Next | None) -> Tensor:
        self._ahead = None if then is None else (result, then)
        return result

    def attend(
        self, layer: int, projected: Tensor, rotary: Rotary | Alibi | None, *, then: Next | None = None
    ) -> Tensor:
        return self._gives(super().attend(layer, projected, rotary), then)

    def linear(
        self, inputs: Tensor, matrix: Linear, *, norm: Norm | None = None, attends: bool = False
    ) -> Tensor:
        self._comes(inputs, matrix, norm)
        return super().linear(inputs, matrix, norm=norm)

    def add_linear(
        self, hidden: Tensor, inputs: Tensor, matrix: Linear, *, then: Next | None = None
    ) -> Tensor:
        self._comes(inputs, matrix, None)
        return self._gives(super().add_linear(hidden, inputs, matrix), then)

    def feed_forward(
        self, hidden: Tensor, up: Linear, down: Linear, *, norm: Norm, then: Next | None = None, **how: bool
    ) -> Tensor:
        self._comes(hidden, up, norm)
        return self._gives(super().feed_forward(hidden, up, down, norm=norm, **how), then)


@pytest.mark.parametrize(("family", "told"), [("llama", 8), (BLOOM_TYPE, 8), ("glm4", 3)])
def test_what_comes_next_is_told_ahead(tmp_path: Path, family: str, told: int) -> None:
    """Three times in each layer, but not before the last feed-forward part, which only some rows get.

    Where norms come before the sums, after attention alone.
    """
    write_native(tmp_path, family, num_hidden_layers=3)
    model = load_model(tmp_path, torch.float32, CPU)
    operations = Foretold(len(PROMPT), model.kv_shape.heads)
    with torch.inference_mode():
        model.logits(model.forward(torch.tensor(PROMPT), operations), operations)
    assert operations.count == told


def test_the_order_of_pairs_matters(tmp_path: Path) -> None:
    """The references above are such that queries and keys in the wrong order would fail."""
    reference = write_native(tmp_path, "llama")
    model = load_model(tmp_path, torch.float32, CPU)
    rows = model.layers[0].qkv.weight
    rows[:16] = rows[:16].view(8, 2, -1).transpose(0, 1).reshape(16, -1)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (whole_passes(model, PROMPT) - expected).abs().max() > 1e-2
