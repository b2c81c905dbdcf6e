"""CUDA graphs without CUDA: their work is done again instead of replayed."""

import pytest
from torch import Tensor

from triton_models.engine import graphs
from triton_models.engine.graphs import SizedGraphs


def do_again(patch: pytest.MonkeyPatch) -> None:
    def compute(self: SizedGraphs, size: int) -> Tensor:
        self.compute(size)
        return self.results(size)

    patch.setattr(graphs, "CapturePool", lambda: None)
    patch.setattr(SizedGraphs, "capture", lambda self, pool: self.run_largest())
    patch.setattr(SizedGraphs, "replay", compute)
