import pytest
import torch
from torch.nn.functional import silu

from triton_models.engine.kernels.swiglu import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 1024, 1100])
def test_is_the_plain_one_within_a_rounding(dtype: torch.dtype, width: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = (torch.randn((3, 2 * width), generator=generator) * 4).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)

    gated = swiglu(gate_up)

    assert gated.dtype == dtype
    # A silu that falls to the other side of a rounding is one spacing off, and so is the product.
    expected = (silu(gate) * up).double()
    spacing = 2 * torch.finfo(dtype).eps * expected.abs()
    assert ((gated.double() - expected).abs() <= spacing + 1e-6).all()
    assert torch.equal(swiglu(gate_up[1:2].clone()), gated[1:2])


def test_large_gates_neither_overflow_nor_turn_into_nan(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=device)
    assert swiglu(gate_up).tolist() == [[0.0, 0.0, 400.0, 2e4]]


def test_nan_spoils_its_row_alone(device: torch.device) -> None:
    gate_up = torch.ones((3, 64), device=device)
    gate_up[1, 5] = torch.nan
    assert swiglu(gate_up).isnan().any(dim=1).tolist() == [False, True, False]
