from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.checkpoint import TINY, write_checkpoint
from bench.gpu.engine_steps import measure_steps


def test_every_batch_size_gives_a_row(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, num_layers=1), torch.device("cpu"))
    rows = list(measure_steps(tmp_path, (1, 3), device="cpu", dtype="float32", context=48))
    assert [(row.batch, row.context) for row in rows] == [(1, 48), (3, 48)]
    assert all(0 < row.step_ms_p50 <= row.step_ms_p99 for row in rows)
    assert all(row.prefill_tok_s > 0 for row in rows)


def test_masked_sequences_are_counted_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, num_layers=1), torch.device("cpu"))
    rows = list(measure_steps(tmp_path, (1, 3), device="cpu", dtype="float32", context=48, masked=(0, 1, 2)))
    assert [(row.batch, row.masked) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]
