from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.triton_models.engine.kernels.test_linear import error, random
from triton_models.engine.kernels import fp8
from triton_models.engine.kernels.elementwise import norm
from triton_models.engine.kernels.fp8 import (
    MAX_ROWS,
    added_rows,
    fp8_linear,
    gated_rows,
    quantise_rows,
    scaled_product,
    tiling_for,
)
from triton_models.engine.kernels.linear import Tiling, new_arrivals
from triton_models.engine.kernels.rows import SCALED_BLOCK, new_marks
from triton_models.engine.models import Norm
from triton_models.engine.quantised import FP8_CAPABILITY, Fp8Linear

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY,
    reason="needs a GPU with products of 8-bit numbers",
)
ERROR = 8e-3
"""Of bfloat16."""


def quantised(
    outputs: int,
    keys: int,
    device: torch.device,
    *,
    bias: bool = False,
) -> Fp8Linear:
    matrix = Fp8Linear.empty(outputs, keys, bias=bias, dtype=torch.bfloat16, device=device)
    matrix.place.copy_(random(outputs, keys, dtype=torch.float32, device=device, seed=1) / 8)
    if matrix.bias is not None:
        matrix.bias.copy_(random(outputs, dtype=torch.bfloat16, device=device, seed=2))
    return matrix


def tiling(splits: int) -> Tiling:
    return Tiling(block_n=16, block_k=128, splits=splits, warps=4, stages=2)


def exact(x: Tensor, matrix: Fp8Linear) -> Tensor:
    numbers, scales = quantise_rows(x)
    return product_of(numbers.double() * scales[:, None].double(), matrix)


def product_of(x: Tensor, matrix: Fp8Linear) -> Tensor:
    product = x @ matrix.dense(0, len(matrix.weight)).double().T
    return product if matrix.bias is None else product + matrix.bias.double()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", [(1, 48, 256), (5, 70, 200), (17, 33, 328)])
def test_both_sides_are_rounded_to_8_bits(
    splits: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, outputs, keys = shape
    x = random(rows, keys, dtype=torch.bfloat16, device=device)
    matrix = quantised(outputs, keys, device, bias=True)
    arrivals = new_arrivals(device)
    product = fp8_linear(quantise_rows(x), matrix, arrivals=arrivals, tiling=tiling(splits))
    assert product.dtype == torch.bfloat16
    assert error(product, exact(x, matrix)) < ERROR
    assert not arrivals.any()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("count", "keys"), [(1, 256), (17, 384), (32, 128)])
def test_blocks_may_have_scales_of_their_own(
    splits: int, count: int, keys: int, device: torch.device
) -> None:
    """As attention writes them; what is in other rows' places counts for nothing."""
    numbers = random(count, keys, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    marks = new_marks(keys, SCALED_BLOCK, device).fill_(torch.nan)
    marks[:, :count] = random(keys // SCALED_BLOCK, count, dtype=torch.float32, device=device, seed=3)
    matrix = quantised(48, keys, device, bias=True)
    x = numbers.double() * marks[:, :count].T.double().repeat_interleave(SCALED_BLOCK, dim=1)
    product = fp8_linear((numbers, marks), matrix, arrivals=new_arrivals(device), tiling=tiling(splits))
    assert error(product, product_of(x, matrix)) < ERROR


def test_gates_take_scales_of_rows(device: torch.device) -> None:
    x = torch.zeros(1, 128, device=device).to(torch.float8_e4m3fn), new_marks(128, SCALED_BLOCK, device)
    with pytest.raises(ValueError, match="scales of rows"):
        fp8_linear(x, quantised(32, 128, device), arrivals=new_arrivals(device), gated=True)


def test_residual_is_added_in_place(device: torch.device) -> None:
    x = random(4, 256, dtype=torch.bfloat16, device=device)
    residual = random(4, 40, dtype=torch.bfloat16, device=device, seed=3)
    matrix = quantised(40, 256, device, bias=True)
    arrivals = new_arrivals(device)
    expected = residual + fp8_linear(quantise_rows(x), matrix, arrivals=arrivals, tiling=tiling(2))
    result = fp8_linear(quantise_rows(x), matrix, arrivals=arrivals, residual=residual, tiling=tiling(2))
    assert result is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_gated_product(splits: int, device: torch.device) -> None:
    x = random(3, 200, dtype=torch.bfloat16, device=device)
    matrix = quantised(2 * 40, 200, device)
    gated = fp8_linear(
        quantise_rows(x), matrix, arrivals=new_arrivals(device), gated=True, tiling=tiling(splits)
    )
    gate, up = exact(x, matrix).chunk(2, dim=-1)
    assert gated.shape == (3, 40)
    assert error(gated, silu(gate) * up) < 3 * ERROR


@pytest.mark.parametrize("companions", [2, 15, 31])
def test_row_depends_on_nothing_else(companions: int, device: torch.device) -> None:
    x = random(1 + companions, 256, dtype=torch.bfloat16, device=device)
    matrix = quantised(48, 256, device)
    arrivals = new_arrivals(device)
    x[0, 3] = torch.nan
    together = fp8_linear(quantise_rows(x), matrix, arrivals=arrivals, tiling=tiling(2))
    alone = fp8_linear(quantise_rows(x[-1:].clone()), matrix, arrivals=arrivals, tiling=tiling(2))
    assert torch.equal(together[-1:], alone)
    assert together.isnan().any(dim=1).tolist() == [True] + [False] * companions


def test_refuses_more_rows_than_it_is_for(device: torch.device) -> None:
    x = random(MAX_ROWS + 1, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="33 rows"):
        fp8_linear(quantise_rows(x), quantised(16, 32, device), arrivals=new_arrivals(device))


def test_refuses_more_split_tiles_than_there_are_counters(device: torch.device) -> None:
    x = random(1, 256, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="4 split tiles"):
        fp8_linear(
            quantise_rows(x), quantised(64, 256, device), arrivals=new_arrivals(device)[:3], tiling=tiling(2)
        )


@pytest.mark.parametrize(("outputs", "splits"), [(4096, 4), (13696, 1), (65024, 1)])
def test_a_large_gpu_is_filled(outputs: int, splits: int) -> None:
    assert tiling_for(outputs).splits == splits


def test_rows_are_rounded_to_8_bits(device: torch.device) -> None:
    x = random(3, 200, dtype=torch.bfloat16, device=device)
    x[1] = 0
    x[2] *= 1e4
    numbers, scales = quantise_rows(x)
    assert scales[1] == 1
    again = numbers.float() * scales[:, None]
    assert (numbers.float().abs().amax(dim=1) == torch.tensor([448.0, 0.0, 448.0], device=device)).all()
    assert ((again - x.float()).abs() <= x.float().abs() / 16 + scales[:, None] * 2**-9).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [128, 200, 2048, 3000, 4096])
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_before_it_is_the_norm_alone(
    dtype: torch.dtype, width: int, device: torch.device, *, biased: bool
) -> None:
    hidden = random(4, width, dtype=dtype, device=device) * 3
    hidden[1] = 0
    hidden[2] *= 1e3
    weight = random(width, dtype=torch.float32, device=device, seed=1)
    bias = random(width, dtype=torch.float32, device=device, seed=2) if biased else None
    kept = hidden.clone()
    numbers, scales = quantise_rows(hidden, Norm(weight, bias, 1e-5))
    expected, expected_scales = quantise_rows(norm(hidden, weight, 1e-5, bias))
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_the_librarys_product_is_the_same(
    scaled: bool, bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it knows scales or not, and with all that may follow it."""
    monkeypatch.setattr(fp8, "_SCALED_ROWS", 5 if scaled else 6)
    monkeypatch.setattr(fp8, "_SCALED_BLOCK", 32)
    x = random(5, 256, dtype=torch.bfloat16, device=device)
    matrix = quantised(96, 256, device, bias=bias)
    expected = exact(x, matrix)
    product = partial(scaled_product, quantise_rows(x), matrix, unit=torch.ones((), device=device))
    assert error(product(), expected) < ERROR
    residual = random(5, 96, dtype=torch.bfloat16, device=device, seed=3)
    before = residual.clone()
    assert product(residual=residual) is residual
    assert error(residual, before + expected) < ERROR
    if not bias:
        gate, up = expected.chunk(2, dim=-1)
        assert error(product(gated=True), silu(gate) * up) < 3 * ERROR


@pytest.mark.parametrize("scaled", [True, False])
def test_gated_rows_are_rounded_as_they_were_in_two_launches(
    scaled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_SCALED_ROWS", 5 if scaled else 6)
    unit = torch.ones((), device=device)
    x = quantise_rows(random(5, 256, dtype=torch.bfloat16, device=device))
    matrix = quantised(2 * 200, 256, device)
    numbers, scales = gated_rows(x, matrix, unit=unit)
    expected, expected_scales = quantise_rows(scaled_product(x, matrix, unit=unit, gated=True))
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_sums_are_normed_and_rounded_as_they_were_in_two_launches(
    scaled: bool, bias: bool, layer_norm: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_SCALED_ROWS", 5 if scaled else 6)
    unit = torch.ones((), device=device)
    x = quantise_rows(random(5, 256, dtype=torch.bfloat16, device=device))
    matrix = quantised(208, 256, device, bias=bias)
    weight, shift = (random(208, dtype=torch.float32, device=device, seed=seed) for seed in (3, 4))
    norm = Norm(weight, shift if layer_norm else None, 1e-5)
    residual = random(5, 208, dtype=torch.bfloat16, device=device, seed=5)
    before = residual.clone()
    numbers, scales = added_rows(x, matrix, unit=unit, residual=residual, norm=norm)
    sums = scaled_product(x, matrix, unit=unit, residual=before)
    expected, expected_scales = quantise_rows(sums, norm)
    assert torch.equal(residual, sums)
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize(("capability", "knows"), [((8, 9), False), ((9, 0), True), ((12, 0), False)])
def test_scales_of_rows_are_for_hopper(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, *, knows: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert fp8._takes_row_scales(torch.device("cuda")) is knows


def test_a_librarys_row_with_nan_spoils_no_other(device: torch.device) -> None:
    x = random(5, 256, dtype=torch.bfloat16, device=device)
    x[1, 3] = torch.nan
    product = scaled_product(quantise_rows(x), quantised(48, 256, device), unit=torch.ones((), device=device))
    assert product.isnan().any(dim=1).tolist() == [False, True, False, False, False]
