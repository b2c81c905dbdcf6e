import pytest
import torch
from torch.nn.functional import rms_norm

from triton_models.engine.kernels.norm import norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return numbers.to(device, dtype)


def norm_weight(width: int, device: torch.device) -> torch.Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(9)).to(device) + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 128, 4096])
def test_norm_is_within_a_rounding(dtype: torch.dtype, width: int, device: torch.device) -> None:
    hidden = random(3, width, dtype=dtype, device=device)
    before = hidden.clone()
    weight = norm_weight(width, device)
    exact = rms_norm(hidden.double(), (width,), weight.double(), EPS)

    normed = norm(hidden, weight, EPS)

    assert torch.equal(hidden, before)
    assert normed.dtype == dtype
    spacing = torch.finfo(dtype).eps * exact.abs()
    assert ((normed.double() - exact).abs() <= spacing + 1e-6).all()
    # Only what lies next to a rounding's boundary may fall to its other side.
    assert dtype == torch.float32 or (normed == exact.to(dtype)).double().mean() > 0.99


def test_row_depends_on_nothing_else(device: torch.device) -> None:
    hidden = random(5, 256, dtype=torch.float32, device=device)
    hidden[1, 7] = torch.nan
    weight = norm_weight(256, device)

    normed = norm(hidden, weight, EPS)

    assert torch.equal(normed[2:3], norm(hidden[2:3].clone(), weight, EPS))
    assert normed.isnan().any(dim=1).tolist() == [False, True, False, False, False]


def test_no_rows(device: torch.device) -> None:
    hidden = random(0, 128, dtype=torch.float32, device=device)
    assert norm(hidden, norm_weight(128, device), EPS).shape == (0, 128)
