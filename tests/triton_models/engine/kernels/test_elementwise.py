import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import layer_norm, rms_norm, silu

from tests.triton_models.engine.kernels.paged import NOWHERE
from tests.triton_models.engine.rotated import rotate_in_place
from triton_models.engine.kernels.elementwise import gelu, norm, rotate_store, swiglu

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 128, 2560])
def test_layer_norm_is_within_a_rounding(dtype: torch.dtype, width: int, device: torch.device) -> None:
    hidden = random(3, width, dtype=dtype, device=device) + 5
    before = hidden.clone()
    weight, bias = norm_weight(width, device), random(width, dtype=torch.float32, device=device, seed=2)
    exact = layer_norm(hidden.double(), (width,), weight.double(), bias.double(), EPS)

    normed = norm(hidden, weight, EPS, bias)

    assert torch.equal(hidden, before)
    assert normed.dtype == dtype
    spacing = torch.finfo(dtype).eps * exact.abs()
    assert ((normed.double() - exact).abs() <= spacing + 1e-5).all()
    assert torch.equal(norm(hidden[1:2].clone(), weight, EPS, bias), normed[1:2])


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


BLOCK_SIZE = 16
POSITIONS = [0, 15, 16, 40]
ROWS = [2, 0, 0, 1]
TABLES = [[3, 1, NOWHERE], [NOWHERE, NOWHERE, 5], [4, NOWHERE, NOWHERE]]
SLOTS = [4 * 16, 3 * 16 + 15, 1 * 16, 5 * 16 + 8]


class TokensAndCache:
    """Four tokens of three sequences, and an empty cache of six blocks."""

    def __init__(
        self,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        pairs: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.query_heads, self.kv_heads = query_heads, kv_heads
        generator = torch.Generator().manual_seed(1)
        size = (len(POSITIONS), query_heads + 2 * kv_heads, head_dim)
        self.projected = torch.randn(size, generator=generator).to(device, dtype)
        angles = torch.rand(64, pairs, generator=generator).to(device) * 100
        self.cos, self.sin = angles.cos(), angles.sin()
        self.keys = torch.full((6, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        self.values = self.keys.clone()

    def run(self, positions: list[int], *, rotates: bool = True) -> None:
        def integers(numbers: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.keys.device)

        rotate_store(
            self.projected, self.cos if rotates else None, self.sin if rotates else None,
            integers(positions), integers(TABLES), integers(ROWS),
            self.keys, self.values, query_heads=self.query_heads,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "pairs"),
    [
        (32, 2, 128, 32),
        (6, 2, 16, 4),
        (4, 1, 32, 8),
        (3, 3, 16, 8),
        (2, 1, 16, 3),
        (4, 4, 20, 5),
        (2, 1, 96, 48),
    ],
)
def test_equals_the_plain_rotation_bit_for_bit(
    *, device: torch.device, query_heads: int, kv_heads: int, head_dim: int, pairs: int, dtype: torch.dtype
) -> None:
    step = TokensAndCache(query_heads, kv_heads, head_dim, pairs, dtype=dtype, device=device)
    expected = step.projected.clone()
    original = step.projected.clone()
    first_value = query_heads + kv_heads
    rotate_in_place(expected[:, :first_value], step.cos[POSITIONS, None, :], step.sin[POSITIONS, None, :])
    step.run(POSITIONS)
    assert torch.equal(step.projected[:, :query_heads], expected[:, :query_heads])
    assert torch.equal(step.projected[:, query_heads:], original[:, query_heads:])
    keys, values = step.keys.flatten(0, 1), step.values.flatten(0, 1)
    assert torch.equal(keys[SLOTS], expected[:, query_heads:first_value])
    assert torch.equal(values[SLOTS], original[:, first_value:])
    untouched = [slot for slot in range(len(keys)) if slot not in SLOTS]
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


def test_without_rotation_keys_and_values_are_only_stored(device: torch.device) -> None:
    step = TokensAndCache(3, 3, 20, 5, dtype=torch.float32, device=device)
    original = step.projected.clone()
    step.run(POSITIONS, rotates=False)
    assert torch.equal(step.projected, original)
    assert torch.equal(step.keys.flatten(0, 1)[SLOTS], original[:, 3:6])
    assert torch.equal(step.values.flatten(0, 1)[SLOTS], original[:, 6:])


def test_padding_writes_nothing(device: torch.device) -> None:
    step = TokensAndCache(6, 2, 16, 4, dtype=torch.float32, device=device)
    original = step.projected.clone()
    step.run([-1, -1, -1, 40])
    assert torch.equal(step.projected[:3], original[:3])
    keys = step.keys.flatten(0, 1)
    assert (keys[SLOTS[:3]] == 7).all()
    assert (keys[SLOTS[3]] != 7).all()


def test_what_lies_beyond_the_rotary_numbers_never_meets_a_zero_sine(device: torch.device) -> None:
    step = TokensAndCache(6, 2, 16, 4, dtype=torch.float32, device=device)
    step.projected[0, 0, 8] = torch.inf
    step.run(POSITIONS)
    assert step.projected[0, 0, 8] == torch.inf
    assert not step.projected.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 1024, 1100])
def test_swiglu_is_within_a_rounding(dtype: torch.dtype, width: int, device: torch.device) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 1100])
def test_gelu_is_within_a_rounding(dtype: torch.dtype, width: int, device: torch.device) -> None:
    inputs = random(3, width, dtype=dtype, device=device)
    inputs[0, :4] = torch.tensor([-1e4, -200.0, 200.0, 1e4])
    exact = torch_gelu(inputs.double(), approximate="tanh")

    result = gelu(inputs)

    assert result is inputs
    spacing = torch.finfo(dtype).eps * exact.abs()
    assert ((result.double() - exact).abs() <= spacing + 1e-6).all()
