"""Rows as products take them, made by a launch of their own or left by what makes them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.kernels.test_linear import error, random
from triton_models.engine.kernels.elementwise import norm
from triton_models.engine.kernels.linear import Tiling, leaves_rows, linear, new_arrivals
from triton_models.engine.kernels.rows import BLOCK, Rows, prepare
from triton_models.engine.kernels.tiles import TiledLinear, takes_sums, tiled, tiled_linear
from triton_models.engine.linear import Linear
from triton_models.engine.models import Norm
from triton_models.engine.quantised import Int4Linear, Int8Linear

ROUNDED = 5e-3
"""Error of rows that are rounded once to bfloat16."""

FORMS = [Linear, Int8Linear, Int4Linear]


def tiling(splits: int) -> Tiling:
    return Tiling(block_n=64, block_k=128, splits=splits, warps=4, stages=2)


def in_blocks(x: Tensor) -> Tensor:
    """Return [M, K] as [M, blocks, 64], with zeros behind the last."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK))
    return padded.view(len(x), -1, BLOCK)


def meant(rows: Rows) -> Tensor:
    """Return the numbers that rows stand for, in float64; checks their sums, if they have them."""
    numbers = rows.numbers.double()
    if rows.sums is not None:
        sums = rows.sums.T[: len(numbers)].double()
        torch.testing.assert_close(sums, in_blocks(numbers).sum(dim=2), atol=1e-3, rtol=1e-4, equal_nan=True)
    if rows.squares is not None:
        mean = rows.squares.double().sum(dim=1, keepdim=True) / numbers.shape[1]
        numbers *= (mean + rows.epsilon).rsqrt()
    return numbers


def made(form: type[Linear], outputs: int, keys: int, device: torch.device, seed: int = 1) -> Linear:
    matrix = form.empty(outputs, keys, bias=False, dtype=torch.bfloat16, device=device)
    matrix.place.copy_(random(outputs, keys, dtype=torch.float32, device=device, seed=seed) / 8)
    return tiled(matrix)


def has_sums(matrix: Linear, count: int) -> bool:
    return isinstance(matrix, TiledLinear) and takes_sums(matrix, count)


def product(matrix: Linear, x: Rows, **options: Any) -> Tensor:
    """Return a product by the matrix's kernel."""
    arrivals = new_arrivals(matrix.weight.device)
    if isinstance(matrix, TiledLinear):
        return tiled_linear(x, matrix, arrivals=arrivals, **options)
    return linear(x, matrix.weight, arrivals=arrivals, **options)


def of(matrix: Linear, x: Tensor, before: Norm | None = None) -> Rows:
    return prepare(x, before, sums=has_sums(matrix, len(x)))


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("width", [64, 200, 1000])
@pytest.mark.parametrize("biased", [None, False, True])
def test_rows_are_prepared(width: int, device: torch.device, *, sums: bool, biased: bool | None) -> None:
    x = random(3, width, dtype=torch.bfloat16, device=device)
    x[1, :63] = 0
    x[2] *= 1e4
    weight, shift = (random(width, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    before = None if biased is None else Norm(weight, shift if biased else None, 1e-5)
    rows = prepare(x, before, sums=sums)
    expected = x if before is None else norm(x, weight, 1e-5, before.bias)
    assert (rows.sums is not None) is sums
    assert rows.squares is None
    assert torch.equal(meant(rows), expected.double())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("count", "outputs"), [(1, 192), (5, 200), (17, 130)])
def test_sums_are_left_with_their_norm_begun(
    form: type[Linear], splits: int, count: int, outputs: int, device: torch.device, *, sums: bool
) -> None:
    """Rows and columns beyond the last count for nothing."""
    matrix = made(form, outputs, 256, device)
    x = of(matrix, random(count, 256, dtype=torch.bfloat16, device=device))
    residual = random(count, outputs, dtype=torch.bfloat16, device=device, seed=3)
    weight = random(outputs, dtype=torch.float32, device=device, seed=4)
    following = Norm(weight, None, 1e-5)
    ahead = Rows.empty(count, outputs, sums=sums, norm=following, dtype=residual.dtype, device=device)
    expected = product(matrix, x, residual=residual.clone(), tiling=tiling(splits))
    result = product(matrix, x, residual=residual, tiling=tiling(splits), ahead=ahead)
    assert result is residual
    assert torch.equal(result, expected)
    for each, wanted in zip(meant(ahead), norm(result, weight, 1e-5).double(), strict=True):
        assert error(each, wanted) < ROUNDED


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("count", [1, 17])
def test_gated_products_are_left_with_their_sums(splits: int, count: int, device: torch.device) -> None:
    matrix = made(Int4Linear, 2 * 192, 128, device)
    x = of(matrix, random(count, 128, dtype=torch.bfloat16, device=device))
    ahead = Rows.empty(count, 192, sums=True, norm=None, dtype=torch.bfloat16, device=device)
    expected = product(matrix, x, gated=True, tiling=tiling(splits))
    result = product(matrix, x, gated=True, tiling=tiling(splits), ahead=ahead)
    assert result is ahead.numbers
    assert torch.equal(meant(ahead), expected.double())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("count", [1, 17])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_of_rows_that_were_left_is_that_of_their_norm(
    form: type[Linear], splits: int, count: int, device: torch.device, *, gated: bool
) -> None:
    before, matrix = made(form, 200, 128, device), made(form, 256, 200, device, seed=2)
    x = of(before, random(count, 128, dtype=torch.bfloat16, device=device))
    residual = random(count, 200, dtype=torch.bfloat16, device=device, seed=3)
    following = Norm(random(200, dtype=torch.float32, device=device, seed=4), None, 1e-5)
    sums = has_sums(matrix, count)
    ahead = Rows.empty(count, 200, sums=sums, norm=following, dtype=residual.dtype, device=device)
    hidden = product(before, x, residual=residual, tiling=tiling(splits), ahead=ahead)
    multiply = partial(product, matrix, tiling=tiling(splits), gated=gated)
    expected = multiply(of(matrix, hidden, following))
    assert error(multiply(ahead), expected.double()) < (2 if gated else 1) * 8e-3


def test_a_row_with_nan_spoils_no_other(device: torch.device) -> None:
    x = random(3, 128, dtype=torch.bfloat16, device=device)
    x[1, 3] = torch.nan
    following = Norm(torch.ones(192, device=device), None, 1e-5)
    ahead = Rows.empty(3, 192, sums=True, norm=following, dtype=x.dtype, device=device)
    residual = torch.zeros(3, 192, dtype=x.dtype, device=device)
    product(made(Linear, 192, 128, device), Rows(x), residual=residual, tiling=tiling(1), ahead=ahead)
    assert meant(ahead).isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(("block_n", "whole"), [(16, False), (32, False), (64, True), (128, True)])
def test_only_whole_blocks_are_left(block_n: int, *, whole: bool) -> None:
    assert leaves_rows(Tiling(block_n=block_n, block_k=64, splits=1, warps=4, stages=3)) is whole
