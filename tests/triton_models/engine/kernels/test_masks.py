import pytest
import torch

from triton_models.engine import sampler
from triton_models.engine.kernels import masks
from triton_models.engine.kernels.masks import forbid

VOCABULARY = 700


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows of few tokens into blocks as rows of many are."""
    monkeypatch.setattr(masks, "_BLOCK", 256)


def test_the_logits_are_those_of_the_plain_operations(device: torch.device) -> None:
    dice = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31, (3, 22), generator=dice).to(device, torch.int32)
    words[1], words[2] = 0, -1
    rows = torch.tensor([4, 0, 2], device=device)
    logits = torch.randn((5, VOCABULARY), generator=dice).to(device)
    before, plain = logits.clone(), logits.clone()
    sampler.forbid(plain, rows, words)
    forbid(logits, rows, words)
    assert torch.equal(logits, plain)
    assert torch.equal(logits[[1, 2, 3]], before[[1, 2, 3]])
    assert (logits[0] == -torch.inf).all()
    for token in (0, 31, 32, 255, 256, VOCABULARY - 1):
        allowed = bool(int(words[0, token // 32]) >> token % 32 & 1)
        assert logits[4, token] == (before[4, token] if allowed else -torch.inf)
