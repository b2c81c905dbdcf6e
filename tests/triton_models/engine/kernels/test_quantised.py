import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.triton_models.engine.kernels.test_linear import error, random
from triton_models.engine.kernels.linear import Tiling, new_arrivals
from triton_models.engine.kernels.quantised import (
    MAX_ROWS,
    expand,
    quantise_rows,
    quantised_linear,
    scaled_product,
    tiling_for,
)
from triton_models.engine.quantised import (
    FP8_CAPABILITY,
    GROUP,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
)

needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY,
    reason="needs a GPU with products of 8-bit numbers",
)
ERRORS = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
FORMS = [Int8Linear, Int4Linear]
ALL = [*FORMS, pytest.param(Fp8Linear, marks=needs_fp8)]
SHAPES = [(1, 48, 256), (5, 70, 200), (17, 33, 328)]


def quantised(
    form: type[QuantisedLinear],
    outputs: int,
    keys: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bias: bool = False,
) -> QuantisedLinear:
    matrix = form.empty(outputs, keys, bias=bias, dtype=dtype, device=device)
    matrix.place.copy_(random(outputs, keys, dtype=torch.float32, device=device, seed=1) / 8)
    if matrix.bias is not None:
        matrix.bias.copy_(random(outputs, dtype=dtype, device=device, seed=2))
    return matrix


def tiling(splits: int) -> Tiling:
    return Tiling(block_n=16, block_k=GROUP, splits=splits, warps=4, stages=2)


def exact(x: Tensor, matrix: QuantisedLinear) -> Tensor:
    if isinstance(matrix, Fp8Linear):
        numbers, scales = quantise_rows(x)
        x = numbers.double() * scales[:, None].double()
    product = x.double() @ matrix.dense(0, len(matrix.weight)).double().T
    return product if matrix.bias is None else product + matrix.bias.double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_product(
    form: type[QuantisedLinear],
    dtype: torch.dtype,
    splits: int,
    shape: tuple[int, int, int],
    device: torch.device,
) -> None:
    rows, outputs, keys = shape
    x = random(rows, keys, dtype=dtype, device=device)
    arrivals = new_arrivals(device)
    for bias in (False, True):
        matrix = quantised(form, outputs, keys, dtype=dtype, device=device, bias=bias)
        product = quantised_linear(x, matrix, arrivals=arrivals, tiling=tiling(splits))
        assert product.dtype == dtype
        assert error(product, exact(x, matrix)) < ERRORS[dtype]
    assert not arrivals.any()


@needs_fp8
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_sides_are_rounded_to_8_bits(
    splits: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, outputs, keys = shape
    x = random(rows, keys, dtype=torch.bfloat16, device=device)
    matrix = quantised(Fp8Linear, outputs, keys, dtype=torch.bfloat16, device=device, bias=True)
    product = quantised_linear(x, matrix, arrivals=new_arrivals(device), tiling=tiling(splits))
    assert product.dtype == torch.bfloat16
    assert error(product, exact(x, matrix)) < ERRORS[torch.bfloat16]


@pytest.mark.parametrize("form", ALL)
def test_residual_is_added_in_place(form: type[QuantisedLinear], device: torch.device) -> None:
    x = random(4, 256, dtype=torch.bfloat16, device=device)
    residual = random(4, 40, dtype=torch.bfloat16, device=device, seed=3)
    matrix = quantised(form, 40, 256, dtype=torch.bfloat16, device=device, bias=True)
    arrivals = new_arrivals(device)
    expected = residual + quantised_linear(x, matrix, arrivals=arrivals, tiling=tiling(2))
    result = quantised_linear(x, matrix, arrivals=arrivals, residual=residual, tiling=tiling(2))
    assert result is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("splits", [1, 2])
def test_gated_product(form: type[QuantisedLinear], splits: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if form is Fp8Linear else torch.float32
    x = random(3, 200, dtype=dtype, device=device)
    matrix = quantised(form, 2 * 40, 200, dtype=dtype, device=device)
    gated = quantised_linear(x, matrix, arrivals=new_arrivals(device), gated=True, tiling=tiling(splits))
    gate, up = exact(x, matrix).chunk(2, dim=-1)
    assert gated.shape == (3, 40)
    assert error(gated, silu(gate) * up) < 3 * ERRORS[dtype]


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("companions", [2, 31, 63, 130])
def test_row_depends_on_nothing_else(
    form: type[QuantisedLinear], companions: int, device: torch.device
) -> None:
    if companions >= MAX_ROWS[form]:
        pytest.skip("more rows than it takes")
    x = random(1 + companions, 256, dtype=torch.bfloat16, device=device)
    matrix = quantised(form, 48, 256, dtype=torch.bfloat16, device=device)
    arrivals = new_arrivals(device)
    x[0, 3] = torch.nan
    together = quantised_linear(x, matrix, arrivals=arrivals, tiling=tiling(2))
    alone = quantised_linear(x[-1:].clone(), matrix, arrivals=arrivals, tiling=tiling(2))
    assert torch.equal(together[-1:], alone)
    assert together.isnan().any(dim=1).tolist() == [True] + [False] * companions


def test_numbers_far_from_zero_cost_no_precision(device: torch.device) -> None:
    """A q of 4 bits is multiplied with an offset, which the sums of x take back."""
    x = random(2, 256, dtype=torch.bfloat16, device=device) + 50
    matrix = quantised(Int4Linear, 32, 256, dtype=torch.bfloat16, device=device)
    product = quantised_linear(x, matrix, arrivals=new_arrivals(device))
    assert error(product, exact(x, matrix)) < ERRORS[torch.bfloat16]


def test_refuses_more_rows_than_it_is_for(device: torch.device) -> None:
    matrix = quantised(Int8Linear, 16, 32, dtype=torch.float32, device=device)
    x = random(MAX_ROWS[Int8Linear] + 1, 32, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="257 rows"):
        quantised_linear(x, matrix, arrivals=new_arrivals(device))


def test_refuses_more_split_tiles_than_there_are_counters(device: torch.device) -> None:
    matrix = quantised(Int8Linear, 64, 256, dtype=torch.float32, device=device)
    x = random(1, 256, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="4 split tiles"):
        quantised_linear(x, matrix, arrivals=new_arrivals(device)[:3], tiling=tiling(2))


@pytest.mark.parametrize(
    ("form", "outputs", "splits"),
    [
        (Int8Linear, 4096, 4),
        (Int4Linear, 4096, 8),
        (Int4Linear, 13696, 2),
        (Fp8Linear, 4096, 2),
        (Int8Linear, 65024, 1),
    ],
)
def test_a_large_gpu_is_filled(form: type[QuantisedLinear], outputs: int, splits: int) -> None:
    assert tiling_for(form, outputs, torch.bfloat16).splits == splits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("keys", [200, 2304])
def test_expands_to_the_defined_weights(
    form: type[QuantisedLinear], dtype: torch.dtype, keys: int, device: torch.device
) -> None:
    matrix = quantised(form, 20, keys, dtype=dtype, device=device)
    assert torch.equal(expand(matrix, 3, 50), matrix.dense(3, 20))


def test_rows_are_rounded_to_8_bits(device: torch.device) -> None:
    x = random(3, 200, dtype=torch.bfloat16, device=device)
    x[1] = 0
    x[2] *= 1e4
    numbers, scales = quantise_rows(x)
    assert scales[1] == 1
    again = numbers.float() * scales[:, None]
    assert (numbers.float().abs().amax(dim=1) == torch.tensor([448.0, 0.0, 448.0], device=device)).all()
    assert ((again - x.float()).abs() <= x.float().abs() / 16 + scales[:, None] * 2**-9).all()


@needs_fp8
@pytest.mark.parametrize("bias", [False, True])
def test_the_librarys_product_is_the_same(bias: bool, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the library has it for GPUs")
    x = random(5, 256, dtype=torch.bfloat16, device=device)
    matrix = quantised(Fp8Linear, 48, 256, dtype=torch.bfloat16, device=device, bias=bias)
    assert isinstance(matrix, Fp8Linear)
    assert error(scaled_product(x, matrix), exact(x, matrix)) < ERRORS[torch.bfloat16]
