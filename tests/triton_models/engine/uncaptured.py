"""CUDA graphs without CUDA: their work is done again instead of replayed."""

import pytest
import torch

from triton_models.engine.graphs import SizedGraphs


def do_again(patch: pytest.MonkeyPatch) -> None:
    work = {}
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(SizedGraphs, "capture", lambda self, of, pool: work.update({self: of}))
    patch.setattr(SizedGraphs, "replay", lambda self, size: work[self](size))
