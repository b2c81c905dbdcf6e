from pathlib import Path

import torch

from bench.gpu.check_engine import check_golden, check_sampled
from triton_models.engine.backend import PLAIN

GOLDEN = Path(__file__).parents[2] / "golden" / "chatglm3"
CPU = torch.device("cpu")


def test_the_plain_backend_passes_both_checks() -> None:
    greedy = check_golden(GOLDEN, torch.float32, CPU, PLAIN).split()
    assert greedy[0] == greedy[2] != "0"
    assert check_sampled(GOLDEN, CPU, PLAIN).startswith("64 of 64 ")
