import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from triton.runtime.errors import OutOfResources

from triton_models.engine.kernels.linear import (
    MAX_ROWS,
    Tiling,
    launch,
    leaves_rows,
    linear,
    new_arrivals,
    tiling_for,
)
from triton_models.engine.kernels.rows import Rows

ERRORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of a result rounded once, as a share of its norm."""


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def tiling(splits: int) -> Tiling:
    return Tiling(block_n=16, block_k=32, splits=splits, warps=4, stages=2)


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 48, 64), (5, 70, 200), (17, 33, 96)])
def test_is_the_product(
    dtype: torch.dtype, splits: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, outputs, keys = shape
    x = random(rows, keys, dtype=dtype, device=device)
    weight = random(outputs, keys, dtype=dtype, device=device, seed=1)
    bias = random(outputs, dtype=dtype, device=device, seed=2) * 4
    arrivals = new_arrivals(device)

    plain = linear(Rows(x), weight, arrivals=arrivals, tiling=tiling(splits))
    biased = linear(Rows(x), weight, bias, arrivals=arrivals, tiling=tiling(splits))

    exact = x.double() @ weight.double().T
    assert plain.dtype == dtype
    assert error(plain, exact) < ERRORS[dtype]
    assert error(biased, exact + bias.double()) < ERRORS[dtype]
    assert not arrivals.any()


@pytest.mark.parametrize("splits", [1, 3])
def test_residual_is_added_in_place_behind_the_rounding(splits: int, device: torch.device) -> None:
    x = random(4, 96, dtype=torch.bfloat16, device=device)
    weight = random(40, 96, dtype=torch.bfloat16, device=device, seed=1)
    residual = random(4, 40, dtype=torch.bfloat16, device=device, seed=2)
    arrivals = new_arrivals(device)
    expected = residual + linear(Rows(x), weight, arrivals=arrivals, tiling=tiling(splits))

    result = linear(Rows(x), weight, arrivals=arrivals, residual=residual, tiling=tiling(splits))

    assert result is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("splits", [1, 3])
def test_gated_product(dtype: torch.dtype, splits: int, device: torch.device) -> None:
    x = random(3, 96, dtype=dtype, device=device)
    weight = random(2 * 40, 96, dtype=dtype, device=device, seed=1) / 8
    arrivals = new_arrivals(device)

    gated = linear(Rows(x), weight, arrivals=arrivals, gated=True, tiling=tiling(splits))

    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert gated.dtype == dtype
    assert gated.shape == (3, 40)
    # Gate, silu and the half that it gates are rounded too.
    assert error(gated, silu(gate) * up) < 3 * ERRORS[dtype]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("companions", [2, 15, 31])
def test_row_depends_on_nothing_else(splits: int, companions: int, device: torch.device) -> None:
    x = random(1 + companions, 128, dtype=torch.bfloat16, device=device)
    weight = random(48, 128, dtype=torch.bfloat16, device=device, seed=1)
    arrivals = new_arrivals(device)
    x[0, 3] = torch.nan

    together = linear(Rows(x), weight, arrivals=arrivals, tiling=tiling(splits))
    alone = linear(Rows(x[-1:].clone()), weight, arrivals=arrivals, tiling=tiling(splits))

    assert torch.equal(together[-1:], alone)
    assert together.isnan().any(dim=1).tolist() == [True] + [False] * companions


def test_repeats_bit_for_bit(device: torch.device) -> None:
    x = random(2, 512, dtype=torch.bfloat16, device=device)
    weight = random(64, 512, dtype=torch.bfloat16, device=device, seed=1)
    arrivals = new_arrivals(device)
    first = linear(Rows(x), weight, arrivals=arrivals, tiling=tiling(8))
    for _ in range(3):
        assert torch.equal(linear(Rows(x), weight, arrivals=arrivals, tiling=tiling(8)), first)


def test_refuses_more_rows_than_it_is_for(device: torch.device) -> None:
    x = random(MAX_ROWS + 1, 32, dtype=torch.float32, device=device)
    weight = random(16, 32, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="33 rows"):
        linear(Rows(x), weight, arrivals=new_arrivals(device))


def test_refuses_more_split_tiles_than_there_are_counters(device: torch.device) -> None:
    x = random(1, 64, dtype=torch.float32, device=device)
    weight = random(64, 64, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="4 split tiles"):
        linear(Rows(x), weight, arrivals=new_arrivals(device)[:3], tiling=tiling(2))


def test_default_tiling_is_used(device: torch.device) -> None:
    x = random(2, 96, dtype=torch.bfloat16, device=device)
    weight = random(40, 96, dtype=torch.bfloat16, device=device, seed=1)
    arrivals = new_arrivals(device)
    chosen = tiling_for(40, 96, gated=False, dtype=torch.bfloat16)
    assert torch.equal(
        linear(Rows(x), weight, arrivals=arrivals), linear(Rows(x), weight, arrivals=arrivals, tiling=chosen)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "keys"), [(4608, 4096), (4096, 13696), (288, 96), (65024, 4096), (16, 8)]
)
def test_tiling_covers_any_shape(dtype: torch.dtype, outputs: int, keys: int, device: torch.device) -> None:
    chosen = tiling_for(outputs, keys, gated=False, dtype=dtype)
    tiles = -(-outputs // chosen.block_n)
    assert chosen.splits == 1 or tiles <= len(new_arrivals(device))
    assert chosen.block_n >= 16
    assert chosen.block_k >= 16
    assert chosen.splits <= -(-keys // chosen.block_k)


@pytest.mark.parametrize(("outputs", "keys"), [(4096, 14336), (3584, 3584), (5120, 4096), (64, 8)])
def test_what_adds_to_hidden_states_leaves_rows(outputs: int, keys: int) -> None:
    for dtype, left in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        assert leaves_rows(tiling_for(outputs, keys, gated=False, dtype=dtype, adds=True)) is left


def test_a_gpu_of_less_shared_memory_gets_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_models.engine.kernels.linear._stages", {})
    asked: list[int] = []

    def kernel(x: Tensor, *, num_stages: int, **_constants: int) -> None:
        asked.append(num_stages)
        if num_stages > 2:
            raise OutOfResources(1000 * num_stages, 2000, "shared memory")

    four = Tiling(block_n=16, block_k=32, splits=1, warps=4, stages=4)
    for _ in range(2):
        launch(kernel, four, 1, (torch.zeros(1),), KEYS=8)
    assert asked == [4, 3, 2, 2]


def test_a_gpu_without_room_for_one_stage_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_models.engine.kernels.linear._stages", {})

    def kernel(*_arguments: Tensor, **_constants: int) -> None:
        raise OutOfResources(2000, 1000, "shared memory")

    with pytest.raises(OutOfResources):
        launch(kernel, tiling(1), 1, (torch.zeros(1),), KEYS=8)
