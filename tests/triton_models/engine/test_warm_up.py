import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.engine import random_model
from tests.triton_models.engine.fake_model import FakeModel, continuation, ids, request, run
from tests.triton_models.engine.wild_mix import LARGE_STEP, wild_mix
from triton_models.engine.engine import Engine
from triton_models.engine.models import Operations
from triton_models.engine.models.decoder import DecoderConfig
from triton_models.engine.models.positions import Rope
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.errors import ModelError

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=32)


TINY = EngineSettings(max_running=1, max_waiting=0, max_context=6)


@pytest.mark.parametrize("settings", [SMALL, TINY])
def test_it_leaves_an_engine_as_new(settings: EngineSettings) -> None:
    engine = Engine(FakeModel(), settings)
    warm_up(engine)
    assert (engine.open_requests, engine.stats().kv_blocks_used, engine.take_outputs()) == (0, 0, [])
    engine.add(request("a", (1, 2), SamplingParams(temperature=0.0, max_tokens=4)))
    assert ids(run(engine)["a"]) == continuation((1, 2), 4)


@pytest.mark.parametrize("context", [2, 3, 5])
def test_a_context_of_hardly_any_tokens_is_enough(context: int) -> None:
    engine = Engine(FakeModel(), replace(TINY, max_context=context))
    warm_up(engine)
    assert engine.open_requests == 0


def test_it_meets_prompts_of_several_steps_and_prompts_beside_decodes() -> None:
    model = FakeModel()
    warm_up(Engine(model, SMALL))
    assert any(positions and positions[0] == 8 for positions in model.steps)
    assert any(positions and positions[0] > 0 and 0 in positions[1:] for positions in model.steps)


class Slow(FakeModel):
    def forward(self, tokens: torch.Tensor, operations: Operations) -> torch.Tensor:
        time.sleep(0.002 + 0.001 * len(tokens))
        return super().forward(tokens, operations)


def test_it_tells_the_engine_what_steps_and_rows_take(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = Engine(Slow(), SMALL), []
    monkeypatch.setattr(engine, "note_times", lambda *times: told.append(times))
    warm_up(engine)
    [(step_s, row_s)] = told
    assert step_s > 0.003
    assert 0 < row_s <= step_s


@pytest.mark.parametrize("changes", [{"max_running": 1}, {"draft_tokens": 0}])
def test_where_nothing_is_guessed_nothing_is_timed(
    changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(FakeModel(), replace(SMALL, **changes))
    monkeypatch.setattr(engine, "note_times", lambda *_: pytest.fail("it was timed"))
    warm_up(engine)


class Broken(FakeModel):
    def logits(self, hidden: torch.Tensor, operations: Operations) -> torch.Tensor:
        return torch.full((len(hidden), self.vocab_size), torch.nan)


def test_a_failure_is_told() -> None:
    with pytest.raises(ModelError, match="not finite"):
        warm_up(Engine(Broken(), SMALL))


SHAPE = DecoderConfig(
    layers=2,
    hidden=256,
    feed_forward=512,
    query_heads=32,
    kv_heads=2,
    head_dim=128,
    vocabulary=1152,
    positions=512,
    epsilon=1e-5,
    rope=Rope(share=0.5, base=10_000.0),
    qkv_bias=True,
)
"""Heads as ChatGLM3-6B has them, and little else."""

ROOMY = EngineSettings(
    max_running=24, max_batched_tokens=160, max_context=400, block_size=16, kv_blocks=24 * 25
)
TIGHT = replace(ROOMY, kv_blocks=40)
"""Some sequences are preempted."""
IN_BLOCKS = replace(ROOMY, max_batched_tokens=1200, block_size=64, kv_blocks=24 * 7)
"""As on Hopper, with steps large enough for its larger tiles."""

memory = pytest.mark.parametrize("settings", [ROOMY, TIGHT, IN_BLOCKS], ids=["roomy", "tight", "in blocks"])


@memory
def test_the_mix_that_follows_a_warm_up_holds_everything(settings: EngineSettings) -> None:
    """On any device: what the next test says is worth only what its mix meets, whatever the heads' sizes."""
    shape = replace(SHAPE, hidden=32, feed_forward=64, query_heads=2, head_dim=16)
    engine = Engine(random_model(shape, dtype=torch.float32, device=torch.device("cpu")), settings)
    seen = wild_mix(engine, requests=120, vocabulary=SHAPE.vocabulary)
    assert sum(seen.ends.values()) == 120
    faults = {FinishReason.ERROR, FinishReason.FAULT, FinishReason.MASK, FinishReason.SHUTDOWN}
    assert set(seen.ends) == set(FinishReason) - faults
    assert (seen.preemptions > 0) == (settings is TIGHT)
    assert seen.cached_tokens > 0
    assert seen.prompt_logprobs > 0
    assert seen.prompt_logits > 0
    assert seen.prompt_steps > 0
    assert {1, 2, 3} <= seen.batch_sizes
    assert settings is TIGHT or settings.max_running in seen.batch_sizes
    assert (seen.largest_step > LARGE_STEP) == (settings is IN_BLOCKS)
    assert (engine.open_requests, engine.stats().kv_blocks_used) == (0, 0)


class Made:
    """What was compiled and captured since `clear`, by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        # Here, not above: where there is no GPU, the kernels' tests choose how the package is imported.
        import triton  # noqa: PLC0415

        self.kernels: list[str] = []
        self.captures = 0
        # Called for every kernel that is not in the process's own memory, in a cache on disk or not.
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", self._note_kernel)
        capture = torch.cuda.CUDAGraph.capture_begin

        def note_capture(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
            self.captures += 1
            capture(graph, *args, **kwargs)

        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", note_capture)
        self._regions_before = 0

    def _note_kernel(self, **compilation: Any) -> None:
        self.kernels.append(compilation["repr"])

    @property
    def regions(self) -> int:
        """Regions that torch.compile took up, which does not tell Triton's hook."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        total = 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
        return total - self._regions_before

    def clear(self) -> None:
        self.kernels.clear()
        self.captures = 0
        self._regions_before += self.regions


@pytest.fixture
def made() -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch:
        yield Made(patch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@memory
def test_nothing_is_compiled_or_captured_after_it(
    made: Made, settings: EngineSettings, dtype: torch.dtype
) -> None:
    engine = Engine(random_model(SHAPE, dtype=dtype, device=torch.device("cuda:0")), settings)
    warm_up(engine)
    assert made.captures > 0, "the counting itself does not work"
    made.clear()
    for seed in range(4):
        wild_mix(engine, requests=200, vocabulary=SHAPE.vocabulary, seed=seed)
    assert (made.kernels, made.captures, made.regions) == ([], 0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_nothing_is_compiled_or_captured_after_a_failed_step(made: Made) -> None:
    engine = Engine(random_model(SHAPE, dtype=torch.bfloat16, device=torch.device("cuda:0")), TIGHT)
    warm_up(engine)
    made.clear()
    for number in range(9):
        engine.add(request(str(number), (1, 2, 3), SamplingParams(max_tokens=50)))
    for _ in range(5):
        engine.step()
    engine.fail_running("as if a kernel had failed")
    assert {output.finish_reason for output in engine.take_outputs()} >= {FinishReason.FAULT}
    wild_mix(engine, requests=100, vocabulary=SHAPE.vocabulary)
    assert (made.kernels, made.captures, made.regions) == ([], 0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_kernel_of_a_new_shape_is_counted(made: Made) -> None:
    """What the tests above find nothing of, they would find."""
    shape = replace(SHAPE, hidden=320, head_dim=64)
    engine = Engine(random_model(shape, dtype=torch.bfloat16, device=torch.device("cuda:0")), TIGHT)
    warm_up(engine)
    assert made.kernels
    assert made.captures
