from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu.checkpoint import TINY, write_checkpoint
from bench.gpu.engine_steps import measure_steps
from triton_models.engine.engine import Engine


def test_every_batch_size_gives_a_row(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, layers=1), torch.device("cpu"))
    rows = list(measure_steps(tmp_path, (1, 3), device="cpu", dtype="float32", context=48))
    assert [(row.batch, row.context) for row in rows] == [(1, 48), (3, 48)]
    assert all(0 < row.step_ms_p50 <= row.step_ms_p99 for row in rows)
    assert all(row.prefill_tok_s > 0 for row in rows)


def test_masked_sequences_are_counted_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, layers=1), torch.device("cpu"))
    rows = list(measure_steps(tmp_path, (1, 3), device="cpu", dtype="float32", context=48, masked=(0, 1, 2)))
    assert [(row.batch, row.masked) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]


def test_every_way_to_sample_gives_a_row(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, layers=1), torch.device("cpu"))
    rows = list(
        measure_steps(
            tmp_path, (2,), device="cpu", dtype="float32", context=48, samplings=("plain", "penalties")
        )
    )
    assert [(row.batch, row.sampling) for row in rows] == [(2, "plain"), (2, "penalties")]


def test_no_prompt_of_the_rate_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, computed = Engine.step, []

    def counting(engine: Engine) -> object:
        if stats := step(engine):
            computed.append(stats.prefill_tokens)
        return stats

    monkeypatch.setattr(Engine, "step", counting)
    write_checkpoint(tmp_path, replace(TINY, layers=1), torch.device("cpu"))
    list(measure_steps(tmp_path, (1, 3), device="cpu", dtype="float32", context=80, masked=(0, 1)))
    measured = 2 * (1 + 3)
    # Prompts of 48 tokens, three blocks: all are computed, then all but the last block is found.
    assert sum(computed) == (1 + measured) * 48 + measured * 16
