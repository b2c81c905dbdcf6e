"""The variants for long contexts, beyond position 8,192, against transformers' own implementation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.models.native_glm import native
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

GOLDEN = Path(__file__).parents[3] / "golden"
PROMPT = [(7 * number * number + number) % 1152 for number in range(8300)]
ANSWER = 8


def cut(name: str, directory: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Write a golden checkpoint with its first layer alone and some of its configuration changed."""
    shutil.copytree(GOLDEN / name, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= {"num_layers": 1} | changes
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(directory / "model.safetensors")
    kept = {key: each for key, each in tensors.items() if "layers." not in key or "layers.0." in key}
    save_file(kept, directory / "model.safetensors")
    return kept, config


@pytest.mark.parametrize(
    ("name", "ratio", "length"),
    [("chatglm3", 50, 32768), ("chatglm3", 500, 131072), ("chatglm2", 16, 32768)],
    ids=["chatglm3-6b-32k", "chatglm3-6b-128k", "chatglm2-6b-32k"],
)
def test_answers_and_probabilities_are_the_references(
    tmp_path: Path, name: str, ratio: int, length: int
) -> None:
    tensors, config = cut(name, tmp_path / "model", rope_ratio=ratio, seq_length=length)
    reference = native(tensors, config, divides_positions=name == "chatglm2")
    model = load_model(tmp_path / "model", torch.float32, torch.device("cpu"))
    engine = Engine(model, EngineSettings(max_batched_tokens=2048))
    engine.add(request("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=5)))
    answer = run(engine)["x"]
    with torch.inference_mode():
        sequence = torch.tensor([PROMPT + ids(answer)])
        expected = reference(sequence, logits_to_keep=ANSWER + 1).logits[0].log_softmax(-1)
    for output, wanted in zip(answer, expected[:-1], strict=True):
        assert output.logprobs is not None
        values, tokens = wanted.topk(5)
        assert [token for token, _ in output.logprobs.top] == tokens.tolist()
        assert [value for _, value in output.logprobs.top] == pytest.approx(values.tolist(), abs=1e-4)
