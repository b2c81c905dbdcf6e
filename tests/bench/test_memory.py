"""Memory: what is read when, on a CPU in the place of a GPU. No figure here is a measurement."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from bench import memory
from bench.gpu.checkpoint import SHAPES, TINY
from bench.memory import main, measure
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel
from triton_models.engine.settings import EngineSettings

SHAPE = replace(TINY, layers=1, vocabulary=97, positions=40)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let a CPU stand for the GPU; returns how often each of torch's functions was called."""
    called: Counter[str] = Counter()

    def stand(name: str, *values: object) -> None:
        answers = iter(values)

        def function(*_: object) -> object:
            called[name] += 1
            return next(answers, None)

        monkeypatch.setattr(torch.cuda, name, function)

    stand("memory_allocated", 4_000_000_000)
    stand("max_memory_allocated", 5_000_000_000, 6_000_000_000)
    stand("mem_get_info", (72_500_000_000, 80_000_000_000), (71_000_000_000, 80_000_000_000))
    stand("empty_cache")
    stand("reset_peak_memory_stats")
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    return called


def test_a_row_has_the_weights_and_both_peaks(calls: Counter[str]) -> None:
    row = measure("tiny", "int8", device="cpu", prompt=33, output=64)
    assert (row.model, row.weights, row.load_gb) == ("random tiny", "int8", 4)
    assert (row.prompt_gb, row.prompt_device_gb) == (5, 7.5)
    assert (row.output_gb, row.output_device_gb) == (6, 9)
    assert calls["reset_peak_memory_stats"] == calls["empty_cache"] == 2


@pytest.mark.usefixtures("calls")
def test_the_cache_is_just_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []

    class Kept(Engine):
        def __init__(self, model: CausalModel, settings: EngineSettings) -> None:
            super().__init__(model, settings)
            engines.append(self)

    monkeypatch.setattr(memory, "Engine", Kept)
    measure("tiny", None, device="cpu", prompt=33, output=64)
    assert [each.max_context for each in engines] == [34, 65]
    assert [each.stats().kv_blocks for each in engines] == [3, 5]
    assert [each.stats().preemptions for each in engines] == [0, 0]


def test_only_a_gpu_is_measured() -> None:
    done = CliRunner().invoke(main, ["--device", "cpu"])
    assert done.exit_code == 2
    assert "only a GPU's memory is measured" in done.output
