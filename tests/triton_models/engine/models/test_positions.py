"""ALiBi with heads of any number; `test_decoder.py` and `test_long_context.py` have rotations."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from triton_models.engine.models.positions import alibi


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14, 16, 25, 32, 40, 112])
def test_slopes_are_transformers(heads: int) -> None:
    biases = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    torch.testing.assert_close(alibi(heads, torch.device("cpu")).slopes, biases[:, 0, 1])
