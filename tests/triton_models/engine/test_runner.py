import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.fake_model import FakeModel, continuation, ids, request, run
from triton_models.engine import runner
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel, Operations
from triton_models.engine.ops_torch import TorchOperations
from triton_models.engine.runner import Runner
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


def test_steps_make_the_models_device_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, graphs and events go to the thread's current GPU, whichever GPU their tensors are on."""
    entered: list[torch.device] = []
    inside: list[bool] = []

    @contextmanager
    def spy(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    class Watched(FakeModel):
        def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
            inside.append(entered == [self.device])
            return super().forward(tokens, operations)

    def watched(model: CausalModel, *others: Any) -> TorchOperations:
        inside.append(entered == [model.device])
        return TorchOperations(model, *others)

    monkeypatch.setattr(runner, "current", spy)
    Runner(FakeModel(), replace(PLAIN, operations=watched), SMALL, context=64)
    assert inside == [True]
    engine = Engine(Watched(), SMALL)
    engine.add(request("a", (1, 2)))
    run(engine)
    assert len(inside) > 1
    assert all(inside)


def captured(model: FakeModel) -> Runner:
    """Made as for graphs, and not captured."""
    return Runner(model, replace(PLAIN, graphs=True), SMALL, context=64)


def test_nothing_of_a_runner_outlives_it() -> None:
    """Its device memory is free for the next model at once, not when the collector comes round."""
    gc.collect()
    gc.disable()
    try:
        made = captured(FakeModel())
        cache = weakref.ref(made._cache)
        del made
        assert cache() is None
    finally:
        gc.enable()


def test_a_step_that_samples_nothing_does_not_read_the_head() -> None:
    class Counting(FakeModel):
        def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
            heads.append(len(hidden))
            return super().logits(hidden, operations)

    heads: list[int] = []
    engine = Engine(Counting(), SMALL)
    engine.add(request("a", range(20), SamplingParams(temperature=0.0, max_tokens=2)))
    assert ids(run(engine)["a"]) == continuation(range(20), 2)
    assert heads == [1, 1]


def test_only_a_gpu_is_made_current() -> None:
    chosen = runner.current(torch.device("cuda:3"))
    assert isinstance(chosen, torch.cuda.device)
    assert chosen.idx == 3
    with runner.current(torch.device("cpu")):
        pass


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_first_answers_alike() -> None:
    from bench.engine import MEDIUM, random_model  # noqa: PLC0415 - only where there are two GPUs

    answers = []
    for name in ("cuda:0", "cuda:1"):
        model = random_model(MEDIUM, dtype=torch.bfloat16, device=torch.device(name))
        engine = Engine(model, SMALL)
        for number in range(4):
            sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=20)
            engine.add(request(str(number), (number + 1, 3), sampling))
        answers.append({key: ids(outputs) for key, outputs in run(engine).items()})
    assert answers[0] == answers[1]
