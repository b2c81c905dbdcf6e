"""The training forward pass is the serving one, and learns."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.demo.encoding import Sample
from tools.demo.export import write_config, write_weights
from tools.demo.training import Recipe, learning_rate, train
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings

CPU = torch.device("cpu")
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "kv_channels": 8,
    "num_attention_heads": 4,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps(config | SMALL | {"padded_vocab_size": 64}), encoding="utf-8"
    )
    return tmp_path


def sample(*ids: int, learned_from: int) -> Sample:
    return Sample(np.array(ids, np.uint16), np.arange(len(ids)) >= learned_from)


def test_what_is_learned_is_what_the_engine_then_says(directory: Path) -> None:
    samples = [sample(7, 8, 9, 20, 21, 22, 2, learned_from=3), sample(7, 9, 30, 31, 2, learned_from=2)]
    recipe = replace(Recipe(), steps=80, warm_up_steps=5, tokens_per_step=64, learning_rate=1e-2)
    write_weights(train(directory, samples, recipe, CPU), directory)
    engine = Engine(load_model(directory, torch.float32, CPU), EngineSettings(kv_blocks=64, max_context=64))
    said: dict[str, list[int]] = {"a": [], "b": []}
    sampling = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=frozenset({2}))
    for name, prompt in {"a": (7, 8, 9), "b": (7, 9)}.items():
        engine.add(Request(request_id=name, prompt_ids=prompt, sampling=sampling))
    while engine.open_requests:
        engine.step()
        for output in engine.take_outputs():
            said[output.request_id].append(output.token_id)
    assert said == {"a": [20, 21, 22, 2], "b": [30, 31, 2]}


def test_the_same_seed_trains_the_same_weights(directory: Path) -> None:
    samples = [sample(*range(3, 3 + length), learned_from=1) for length in (4, 9, 17)]
    recipe = replace(Recipe(), steps=4, tokens_per_step=40)
    first, second = (train(directory, samples, recipe, CPU) for _ in range(2))
    assert torch.equal(first.head.weight, second.head.weight)
    other = train(directory, samples, replace(recipe, seed=1), CPU)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_training_that_goes_on_begins_with_the_weights_that_are_there(directory: Path) -> None:
    samples = [sample(7, 8, 9, 20, 21, 2, learned_from=3)]
    recipe = replace(Recipe(), steps=60, warm_up_steps=5, tokens_per_step=64, learning_rate=1e-2)
    trained = train(directory, samples, recipe, CPU)
    write_weights(trained, directory)
    unchanged = train(directory, samples, replace(recipe, steps=0), CPU, go_on=True)
    assert torch.equal(unchanged.head.weight, trained.head.weight.half().float())
    other = train(directory, samples, replace(recipe, steps=2), CPU, go_on=True)
    assert not torch.equal(other.head.weight, unchanged.head.weight)


def test_the_rate_rises_then_falls() -> None:
    recipe = Recipe(steps=100, warm_up_steps=10)
    rates = [learning_rate(recipe, step) for step in range(100)]
    assert max(rates) == pytest.approx(recipe.learning_rate)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 2 * recipe.last_learning_rate
