from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.triton_models.engine.kernels.test_linear import error, random
from triton_models.engine.kernels import tiles
from triton_models.engine.kernels.linear import Tiling, new_arrivals
from triton_models.engine.kernels.rows import prepare
from triton_models.engine.kernels.tiles import (
    MAX_ROWS,
    TiledLinear,
    expand,
    takes_sums,
    tiled,
    tiled_linear,
    tiling_for,
)
from triton_models.engine.linear import Linear
from triton_models.engine.quantised import Fp8Linear, Int4Linear, Int8Linear, QuantisedLinear

ERRORS = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
FORMS = [Int8Linear, Int4Linear]
Form = type[Int8Linear | Int4Linear]
SHAPES = [(1, 48, 256), (5, 70, 200), (17, 130, 328)]
"""Rows of `x`, outputs and K: with and without whole tiles and groups."""


def quantised(
    form: type[QuantisedLinear],
    outputs: int,
    keys: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> QuantisedLinear:
    matrix = form.empty(outputs, keys, bias=bias, dtype=dtype, device=device)
    matrix.place.copy_(random(outputs, keys, dtype=torch.float32, device=device, seed=1) / 8)
    if matrix.bias is not None:
        matrix.bias.copy_(random(outputs, dtype=dtype, device=device, seed=2))
    return matrix


def in_tiles(matrix: QuantisedLinear) -> TiledLinear:
    made = tiled(matrix)
    assert isinstance(made, TiledLinear)
    return made


def tiling(splits: int) -> Tiling:
    return Tiling(block_n=64, block_k=128, splits=splits, warps=4, stages=2)


def multiply(x: Tensor, matrix: TiledLinear, **options: Any) -> Tensor:
    return tiled_linear(prepare(x, sums=takes_sums(matrix, len(x))), matrix, **options)


def exact(x: Tensor, matrix: QuantisedLinear) -> Tensor:
    product = x.double() @ matrix.exact(0, len(matrix.weight)).double().T
    return product if matrix.bias is None else product + matrix.bias.double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_product(
    form: Form, dtype: torch.dtype, splits: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, outputs, keys = shape
    x = random(rows, keys, dtype=dtype, device=device)
    arrivals = new_arrivals(device)
    for bias in (False, True):
        matrix = quantised(form, outputs, keys, dtype=dtype, device=device, bias=bias)
        product = multiply(x, in_tiles(matrix), arrivals=arrivals, tiling=tiling(splits))
        assert product.dtype == dtype
        assert error(product, exact(x, matrix)) < ERRORS[dtype]
        assert error(in_tiles(matrix)(x), exact(x, matrix)) < 2 * ERRORS[dtype]
    assert not arrivals.any()


def test_every_number_of_8_bits_is_itself(device: torch.device) -> None:
    """Also -128, which checkpoints have that others quantised."""
    matrix = Int8Linear.empty(2, 128, bias=False, dtype=torch.bfloat16, device=device)
    matrix.weight.copy_(torch.arange(-128, 128, dtype=torch.int8).view(2, 128))
    matrix.scales.fill_(1.0)
    made = in_tiles(matrix)
    assert torch.equal(expand(made, 0, 2), matrix.weight.bfloat16())
    x = torch.eye(128, dtype=torch.bfloat16, device=device)
    product = multiply(x, made, arrivals=new_arrivals(device))
    assert torch.equal(product, matrix.weight.bfloat16().T)


@pytest.mark.parametrize("form", FORMS)
def test_residual_is_added_in_place(form: Form, device: torch.device) -> None:
    x = random(4, 256, dtype=torch.bfloat16, device=device)
    residual = random(4, 40, dtype=torch.bfloat16, device=device, seed=3)
    matrix = in_tiles(quantised(form, 40, 256, device=device, bias=True))
    arrivals = new_arrivals(device)
    expected = residual + multiply(x, matrix, arrivals=arrivals, tiling=tiling(2))
    result = multiply(x, matrix, arrivals=arrivals, residual=residual, tiling=tiling(2))
    assert result is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("splits", [1, 2])
def test_gated_product(form: Form, splits: int, device: torch.device) -> None:
    x = random(3, 200, dtype=torch.float16, device=device)
    matrix = quantised(form, 2 * 128, 200, dtype=torch.float16, device=device)
    arrivals = new_arrivals(device)
    gated = multiply(x, in_tiles(matrix), arrivals=arrivals, gated=True, tiling=tiling(splits))
    gate, up = exact(x, matrix).chunk(2, dim=-1)
    assert gated.shape == (3, 128)
    assert error(gated, silu(gate) * up) < 3 * ERRORS[torch.float16]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("companions", [2, 31, 130])
def test_row_depends_on_nothing_else(form: Form, companions: int, device: torch.device) -> None:
    x = random(1 + companions, 256, dtype=torch.bfloat16, device=device)
    matrix = in_tiles(quantised(form, 48, 256, device=device))
    arrivals = new_arrivals(device)
    x[0, 3] = torch.nan
    together = multiply(x, matrix, arrivals=arrivals, tiling=tiling(2))
    # With 4 bits, many rows are rounded differently from few.
    fewer = 1 if form is Int8Linear or companions < 32 else 33
    apart = multiply(x[-fewer:].clone(), matrix, arrivals=arrivals, tiling=tiling(2))
    assert torch.equal(together[-1:], apart[-1:])
    assert together.isnan().any(dim=1).tolist() == [True] + [False] * companions


def test_numbers_far_from_zero_cost_no_precision(device: torch.device) -> None:
    """A q of 4 bits is multiplied with an offset, which the sums of x take back."""
    x = random(2, 256, dtype=torch.bfloat16, device=device) + 50
    matrix = quantised(Int4Linear, 32, 256, device=device)
    product = multiply(x, in_tiles(matrix), arrivals=new_arrivals(device))
    assert error(product, exact(x, matrix)) < ERRORS[torch.bfloat16]


def test_refuses_more_rows_than_it_is_for(device: torch.device) -> None:
    matrix = in_tiles(quantised(Int8Linear, 16, 32, device=device))
    x = random(MAX_ROWS + 1, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=f"{MAX_ROWS + 1} rows"):
        multiply(x, matrix, arrivals=new_arrivals(device))


def test_refuses_half_a_tile_of_gates(device: torch.device) -> None:
    matrix = in_tiles(quantised(Int8Linear, 192, 32, device=device))
    x = random(1, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="96 gated outputs"):
        multiply(x, matrix, arrivals=new_arrivals(device), gated=True)


def test_refuses_more_split_tiles_than_there_are_counters(device: torch.device) -> None:
    matrix = in_tiles(quantised(Int8Linear, 256, 256, device=device))
    x = random(1, 256, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="4 split tiles"):
        multiply(x, matrix, arrivals=new_arrivals(device)[:3], tiling=tiling(2))


@pytest.mark.parametrize(("outputs", "splits"), [(4096, 4), (4608, 4), (13696, 1), (65024, 1)])
def test_a_large_gpu_is_filled(outputs: int, splits: int) -> None:
    assert tiling_for(outputs, 4096).splits == splits


@pytest.mark.parametrize(
    ("outputs", "keys", "splits"),
    [(4608, 4096, 7), (4096, 4096, 8), (13696, 4096, 3), (4096, 13696, 6), (65024, 4096, 1), (64, 256, 8)],
)
def test_few_rows_of_4_bits_are_divided_evenly(outputs: int, keys: int, splits: int) -> None:
    assert tiling_for(outputs, keys, late=True).splits == splits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("keys", [200, 512])
def test_expands_to_the_defined_weights(
    form: Form, dtype: torch.dtype, keys: int, device: torch.device
) -> None:
    matrix = quantised(form, 140, keys, dtype=dtype, device=device)
    assert torch.equal(expand(in_tiles(matrix), 64, 500), matrix.dense(64, 140))


@pytest.mark.parametrize("form", FORMS)
def test_few_weights_are_rearranged_and_written_out_at_once(
    form: Form, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    matrix = quantised(form, 140, 256, device=device, bias=True)
    x = random(3, 256, dtype=torch.bfloat16, device=device)
    whole = in_tiles(matrix)
    monkeypatch.setattr(tiles, "_PACKED_WEIGHTS", 1)
    monkeypatch.setattr(tiles, "_EXPANDED_WEIGHTS", 1)
    parts = in_tiles(matrix)
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(parts.scales, whole.scales)
    assert error(parts(x), exact(x, matrix)) < 2 * ERRORS[torch.bfloat16]


def test_other_matrices_stay_as_they_are(device: torch.device) -> None:
    plain = Linear(torch.zeros(2, 128, device=device))
    eight = quantised(Fp8Linear, 2, 128, device=device)
    wide = quantised(Int8Linear, 2, 128, device=device, dtype=torch.float32)
    made = in_tiles(quantised(Int8Linear, 2, 128, device=device))
    assert all(tiled(each) is each for each in (plain, eight, wide, made))
