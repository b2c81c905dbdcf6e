"""The engine on its kernels: the same answers as in plain torch, and as the original code's."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.uncaptured import do_again
from triton_models.checkpoint import load_model
from triton_models.engine.backend import PLAIN, Backend
from triton_models.engine.engine import Engine
from triton_models.engine.kernel_backend import kernel_backend
from triton_models.engine.kernels import linear
from triton_models.engine.kernels.tilings import Tiling
from triton_models.engine.runner import Runner
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import Capacity, EngineSettings

GOLDEN = Path(__file__).parents[3] / "golden"
SMALL = EngineSettings(max_running=4, max_batched_tokens=40, kv_blocks=24)


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Where there is no device to capture graphs, their work is done again instead of replayed.

    And products have large tiles there: the time of the compiler's interpreter goes with their number.
    """
    if device.type != "cuda":
        do_again(monkeypatch)
        large = Tiling(block_n=128, block_k=64, splits=2, warps=4, stages=3)
        monkeypatch.setattr(linear, "tiling_for", lambda *_shape, **_options: large)
    return kernel_backend(torch.float32)


def test_greedy_answers_are_the_original_codes(kernels: Backend, device: torch.device) -> None:
    cases = json.loads((GOLDEN / "chatglm3" / "golden.json").read_text(encoding="utf-8"))["cases"]
    case = min(cases, key=lambda case: len(case["input_ids"]))
    engine = Engine(load_model(GOLDEN / "chatglm3", torch.float32, device), SMALL, backend=kernels)
    engine.add(request("a", case["input_ids"], SamplingParams(temperature=0.0, max_tokens=2)))
    assert ids(run(engine)["a"]) == case["greedy_ids"][:2]


def test_sampled_answers_are_the_plain_ones(kernels: Backend, device: torch.device) -> None:
    model = load_model(GOLDEN / "chatglm3", torch.float32, device)
    requests = [
        request("plain", (5, 6, 7), SamplingParams(temperature=0.8, seed=1, max_tokens=2)),
        request("cut", (8, 9), SamplingParams(temperature=1.0, top_p=0.8, top_k=9, seed=2, max_tokens=2)),
        request("greedy", (4, *range(50)), SamplingParams(temperature=0.0, max_tokens=2)),
        request("told", (3, 1), SamplingParams(temperature=1.0, logprobs=2, seed=3, max_tokens=2)),
    ]
    answers = []
    for backend in (PLAIN, kernels):
        engine = Engine(model, SMALL, backend=backend)
        for each in requests:
            engine.add(each)
        answers.append({key: ids(outputs) for key, outputs in run(engine).items()})
    assert answers[0] == answers[1]


def test_a_rehearsal_needs_no_blocks_and_leaves_nothing(kernels: Backend, device: torch.device) -> None:
    model = load_model(GOLDEN / "chatglm3", torch.float32, device)
    made = Runner(model, kernels, SMALL, Capacity(1, 64, "one block"))
    # Prompts of 16, 32 and 40 rows; decodes of 1, 2 and 4, each computed and sampled.
    assert made.rehearse() == 3 + 2 * 3
    cache = weakref.ref(made._cache)
    gc.disable()
    try:
        del made
        assert cache() is None
    finally:
        gc.enable()
