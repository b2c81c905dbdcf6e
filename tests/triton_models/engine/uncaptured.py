"""CUDA graphs without CUDA: their work is done again instead of replayed."""

import pytest

from triton_models.engine import graphs
from triton_models.engine.graphs import SizedGraphs


def do_again(patch: pytest.MonkeyPatch) -> None:
    work = {}
    patch.setattr(graphs, "CapturePool", lambda: None)
    patch.setattr(SizedGraphs, "capture", lambda self, of, pool: work.update({self: of}))
    patch.setattr(SizedGraphs, "replay", lambda self, size: work[self](size))
