"""CUDA graphs without CUDA: their work is done again instead of replayed."""

import pytest
import torch
from torch import Tensor

from triton_models.engine.graphs import SizedGraphs
from triton_models.engine.step_times import StepTimes


def do_again(patch: pytest.MonkeyPatch) -> None:
    def compute(self: SizedGraphs, size: int) -> Tensor:
        self.compute(size)
        # The host reads it when the next step has been launched; from a GPU, it is copied before.
        return self.results(size).clone()

    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "Stream", lambda: None)
    patch.setattr(SizedGraphs, "capture", lambda self, memory, stream: self.run_largest())
    patch.setattr(SizedGraphs, "replay", compute)
    patch.setattr(SizedGraphs, "times", lambda self, largest: StepTimes())
