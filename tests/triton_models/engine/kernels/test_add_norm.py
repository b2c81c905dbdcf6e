import pytest
import torch
from torch.nn.functional import rms_norm

from triton_models.engine.kernels.add_norm import add_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return numbers.to(device, dtype)


def norm_weight(width: int, device: torch.device) -> torch.Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(9)).to(device) + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 128, 4096])
def test_sum_is_the_plain_one_and_norm_within_a_rounding(
    dtype: torch.dtype, width: int, device: torch.device
) -> None:
    hidden = random(3, width, dtype=dtype, device=device)
    delta = random(3, width, dtype=dtype, device=device, seed=1)
    weight = norm_weight(width, device)
    expected_sum = hidden + delta
    exact = rms_norm(expected_sum.double(), (width,), weight.double(), EPS)

    normed = add_norm(hidden, delta, weight, EPS)

    assert torch.equal(hidden, expected_sum)
    assert normed.dtype == dtype
    spacing = torch.finfo(dtype).eps * exact.abs()
    assert ((normed.double() - exact).abs() <= spacing + 1e-6).all()
    # Only what lies next to a rounding's boundary may fall to its other side: the sum was rounded before.
    assert dtype == torch.float32 or (normed == exact.to(dtype)).double().mean() > 0.99


def test_without_delta_hidden_stays(device: torch.device) -> None:
    hidden = random(2, 128, dtype=torch.bfloat16, device=device)
    before = hidden.clone()
    weight = norm_weight(128, device)

    normed = add_norm(hidden, None, weight, EPS)

    assert torch.equal(hidden, before)
    assert torch.equal(normed, add_norm(before, torch.zeros_like(before), weight, EPS))


def test_row_depends_on_nothing_else(device: torch.device) -> None:
    hidden = random(5, 256, dtype=torch.float32, device=device)
    delta = random(5, 256, dtype=torch.float32, device=device, seed=1)
    weight = norm_weight(256, device)
    alone, alone_delta = hidden[2:3].clone(), delta[2:3].clone()
    delta[1, 7] = torch.nan

    normed = add_norm(hidden, delta, weight, EPS)

    assert torch.equal(normed[2:3], add_norm(alone, alone_delta, weight, EPS))
    assert normed.isnan().any(dim=1).tolist() == [False, True, False, False, False]


def test_no_rows(device: torch.device) -> None:
    hidden = random(0, 128, dtype=torch.float32, device=device)
    assert add_norm(hidden, hidden.clone(), norm_weight(128, device), EPS).shape == (0, 128)
