from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.engine import random_model
from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.uncaptured import do_again
from tests.triton_models.engine.wild_mix import EvenTokens
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.graphs import (
    CapturedSteps,
    DeviceStep,
    PromptsSize,
    SizedGraphs,
    decode_sizes,
    prompt_sizes,
)
from triton_models.engine.models import StepLayout
from triton_models.engine.models.decoder import DecoderConfig
from triton_models.engine.models.positions import Rope
from triton_models.engine.ops_torch import TorchOperations
from triton_models.engine.sampler import PlainRules
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.engine.slots import SlotTable
from triton_models.engine.step_times import StepTimes


@pytest.mark.parametrize("largest", [1, 2, 3, 24, 128, 500, 512])
def test_decode_sizes_rise_to_the_largest_and_waste_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == 1
    for decodes in range(1, largest + 1):
        padded = next(size for size in sizes if size >= decodes)
        assert padded - decodes < max(8, 0.13 * decodes)


@pytest.mark.parametrize("largest", [16, 500, 2048, 4096, 8192])
def test_prompt_sizes_stay_within_a_step_and_waste_little(largest: int) -> None:
    sizes = prompt_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(largest, 4096), "a full step is captured, too"
    for rows in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= rows)
        assert padded - rows < max(16, 0.0625 * rows)


SPARE = 6


MANY_KEYS_ROWS, PARTS = 32, 50


class Tiled(TorchOperations):
    """Says how many tiles there are."""

    many_keys_rows = MANY_KEYS_ROWS

    def __init__(self) -> None:
        pass

    def most_tiles(self, rows: int, chunks: int, *, many_keys: bool) -> int:
        return rows + chunks + many_keys * PARTS


class FewerTiles(Tiled):
    """As where the largest steps have larger tiles."""

    def most_tiles(self, rows: int, chunks: int, *, many_keys: bool) -> int:
        return chunks + (2 if rows == 96 else rows)


class Seen(DeviceStep):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.slots = SlotTable(SPARE, 4, torch.device("cpu"))
        self.slots.lengths[2], self.slots.tokens[2] = 5, 9
        self.longest = 64
        self.steps: list[tuple[list[int], StepLayout]] = []

    def decode(self, slots: Tensor, longest: int) -> Tensor:
        return torch.zeros(len(slots), 1)

    def finish(self, slots: Tensor, logits: Tensor, rules: PlainRules, words: Tensor) -> Tensor:
        return torch.zeros(3, len(slots))

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        self.steps.append((tokens.tolist(), layout))
        return tokens[:, None].float()


def inputs(*, decodes: int, chunk: int, size: int) -> tuple[Tensor, Tensor]:
    """A step of some decodes and one chunk in a tile for each token, filled up to a captured size."""
    padding = size - decodes - chunk
    slots = [2] * decodes + [1] * chunk + [SPARE] * padding
    tokens = [-1] * decodes + [7] * chunk + [0] * padding
    positions = [0] * decodes + [3] * chunk + [-1] * padding
    tiles = [3] * (7 * chunk)
    return torch.tensor(slots + tokens + positions), torch.tensor(
        tiles + [0] * (7 * (size + 64) - len(tiles))
    )


def test_a_captured_step_sees_nothing_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    do_again(monkeypatch)
    step = Seen()
    captured = CapturedSteps(step, vocabulary=64, largest=96, operations=Tiled())
    captured.capture()
    step.steps.clear()
    captured.prompts(*inputs(decodes=5, chunk=80, size=96), many_keys=False)
    hidden = captured.prompts(*inputs(decodes=2, chunk=20, size=32), many_keys=False)
    (before, _), (tokens, layout) = step.steps
    assert len(before) == 96
    assert tokens == [9] * 2 + [7] * 20 + [0] * 10
    assert hidden[:, 0].tolist() == tokens
    assert layout.decode_lengths.tolist() == [6, 6] + [0] * (SPARE - 2)
    assert layout.slots.tolist() == [2] * 2 + [1] * 20 + [SPARE] * 10
    assert layout.positions.tolist() == [5] * 2 + [3] * 20 + [-1] * 10
    assert layout.tiles is not None
    assert layout.tiles.sum(1).tolist() == [21] * 20 + [0] * (len(layout.tiles) - 20)


def test_a_small_step_may_have_more_tiles_than_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    do_again(monkeypatch)
    step = Seen()
    captured = CapturedSteps(step, vocabulary=64, largest=96, operations=FewerTiles())
    captured.capture()
    step.steps.clear()
    size = captured.size_for(30, 90, many_keys=False)
    assert size == PromptsSize(32, 96)
    tokens, tiles = torch.full((3 * 32,), 1), torch.arange(7 * 96)
    captured.prompts(tokens, tiles, many_keys=False)
    ((_, layout),) = step.steps
    assert layout.tiles is not None
    assert layout.tiles.flatten().tolist() == tiles.tolist()


def test_steps_of_few_rows_are_captured_with_divided_tiles_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    do_again(monkeypatch)
    step = Seen()
    captured = CapturedSteps(step, vocabulary=64, largest=96, operations=Tiled())
    captured.capture()
    step.steps.clear()
    assert captured.size_for(30, 90, many_keys=False) == PromptsSize(32, 96)
    assert captured.size_for(30, 90, many_keys=True) == PromptsSize(32, 146)
    assert captured.size_for(30, 147, many_keys=True) is None
    assert captured.size_for(33, 1, many_keys=True) is None
    for many_keys in (True, False):
        captured.prompts(torch.full((3 * 32,), 1), torch.ones(7 * 96, dtype=torch.int64), many_keys=many_keys)
    assert [layout.many_keys for _, layout in step.steps] == [True, False]
    assert [len(layout.tiles) for _, layout in step.steps if layout.tiles is not None] == [146, 96]


def test_steps_with_prompts_are_timed_at_each_size_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.at - self.at)

    def work(size: int) -> Tensor:
        nonlocal now
        runs.append(size)
        now += size + (runs.count(size) == 2)
        return torch.zeros(size)

    runs: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    graphs = SizedGraphs([16, 32, 64], work)
    monkeypatch.setattr(graphs, "replay", graphs.compute)
    graphs.run_largest()
    runs.clear()
    assert graphs.times(32) == StepTimes((16, 32), (16.0, 32.0)), "the one slow time of each does not count"
    assert set(runs) == {16, 32}


SHAPE = DecoderConfig(
    layers=1,
    hidden=32,
    feed_forward=64,
    query_heads=2,
    kv_heads=1,
    head_dim=16,
    vocabulary=96,
    positions=64,
    epsilon=1e-5,
    rope=Rope(share=0.5, base=10_000.0),
    qkv_bias=True,
)
MODEL = random_model(SHAPE, dtype=torch.float32, device=torch.device("cpu"))
SETTINGS = EngineSettings(max_running=4, max_context=64, max_batched_tokens=16, draft_tokens=0)
TRUNCATED = {"top_p": 0.6}
MASKED = {"mask": EvenTokens()}


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [
        (PlainRules.NOTHING_MORE, [{}, {}, {"temperature": 0.0, "top_k": 3}]),
        (PlainRules.TRUNCATION, [{}, TRUNCATED, {"temperature": 0.0}]),
        (PlainRules.TRUNCATION_AND_MASKS, [MASKED, TRUNCATED, MASKED]),
        (PlainRules.TRUNCATION_AND_MASKS, [{}, MASKED, {**MASKED, **TRUNCATED}]),
        (None, [{}, {**MASKED, "logprobs": 1}, TRUNCATED]),
        (None, [{"presence_penalty": 1.0}, MASKED, TRUNCATED]),
    ],
)
def test_captured_sampling_heeds_every_rows_rules(
    rules: PlainRules | None, kinds: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end one after the other, so that their rows change places."""
    do_again(monkeypatch)
    used: list[PlainRules] = []
    finish = CapturedSteps.finish

    def seen(self: CapturedSteps, size: int, rules: PlainRules, masks: Any) -> Tensor:
        used.append(rules)
        return finish(self, size, rules, masks)

    monkeypatch.setattr(CapturedSteps, "finish", seen)
    # Torch's operations cannot compute padded prompts.
    monkeypatch.setattr(CapturedSteps, "size_for", lambda *_, **__: None)
    prompts = DeviceStep.prompts

    def not_padded(self: DeviceStep, rows: Tensor, *args: Any, **kinds: Any) -> Tensor:
        return prompts(self, rows, *args, **kinds) if kinds.get("chunks") else torch.zeros(rows.shape[1], 1)

    monkeypatch.setattr(DeviceStep, "prompts", not_padded)
    answers = []
    for graphs in (False, True):
        engine = Engine(MODEL, SETTINGS, backend=replace(PLAIN, graphs=graphs))
        for number, kind in enumerate(kinds):
            params = {"temperature": 1.5, "seed": number, "max_tokens": 20 + 10 * number, **kind}
            engine.add(request(str(number), (number, 5), SamplingParams(**params)))
        answers.append({key: ids(outputs) for key, outputs in run(engine).items()})
        assert (set(used[:10]) == {rules}) if graphs and rules else (graphs or not used)
    assert answers[0] == answers[1]
    assert [len(answers[1][str(number)]) for number in range(3)] == [20, 30, 40]
    for number, kind in enumerate(kinds):
        if "mask" in kind:
            assert not any(token % 2 for token in answers[1][str(number)])
