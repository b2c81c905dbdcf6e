"""GLM-4's shape against transformers' own implementation of it, on a checkpoint as published."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.glm4_checkpoint import CONFIG, write_checkpoint
from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.models.native_glm import native
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.models.decoder import DecoderConfig
from triton_models.engine.models.positions import Rope
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.families import read_shape

CPU = torch.device("cpu")
PROMPT = [332, 334, 337, 10, 300, 7, 422, 99, 338]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_qkv_bias": False, "multi_query_group_num": 4, "rope_ratio": 10000},  # as the 1M variant has them
    {"multi_query_attention": False, "kv_channels": 32, "hidden_size": 96, "rope_ratio": 1},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_answers_and_probabilities_are_the_references(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = native(write_checkpoint(tmp_path, **changes), CONFIG | changes)
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
        one, other = (
            native(tensors, CONFIG | {"rope_ratio": ratio})(torch.tensor([PROMPT])).logits
            for ratio in (500, 50)
        )
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
    config = read_shape(tmp_path)
    assert config == DecoderConfig(
        layers=40,
        hidden=4096,
        feed_forward=13696,
        query_heads=32,
        kv_heads=2,
        head_dim=128,
        vocabulary=151552,
        positions=131072,
        epsilon=1.5625e-07,
        rope=Rope(share=0.5, base=5_000_000.0),
        qkv_bias=True,
    )
    assert config.nbytes(torch.bfloat16) == pytest.approx(18.8e9, rel=0.01)
