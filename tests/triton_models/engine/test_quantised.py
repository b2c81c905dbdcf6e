import pytest
import torch
from torch import Tensor

from triton_models.engine import quantised
from triton_models.engine.quantised import (
    GROUP,
    QUANTISATIONS,
    Fp8Linear,
    Int8Linear,
    QuantisedLinear,
)

CPU = torch.device("cpu")
SHAPES = [(1, 1), (7, 33), (48, 128), (130, 257), (80, 384)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantise(
    form: type[QuantisedLinear], weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> QuantisedLinear:
    matrix = form.empty(*weight.shape, bias=bias is not None, dtype=dtype, device=CPU)
    matrix.place.copy_(weight)
    if bias is not None and matrix.bias is not None:
        matrix.bias.copy_(bias)
    return matrix


def defined(matrix: QuantisedLinear) -> Tensor:
    """The weights, number by number as the classes' docstrings define them."""
    weight, scales = matrix.weight.tolist(), matrix.scales.double().tolist()
    if isinstance(matrix, Fp8Linear):
        weight = matrix.weight.double().tolist()
    if isinstance(matrix, Int8Linear | Fp8Linear):
        return torch.tensor([[q * scale for q in row] for row, scale in zip(weight, scales, strict=True)])
    rows = []
    for number, row in enumerate(weight):
        numbers = []
        for column in range(matrix.columns):
            group, place = divmod(column, GROUP)
            byte = row[group * GROUP // 2 + place % (GROUP // 2)]
            scale, zero = scales[group][number]
            numbers.append(((byte >> 4 if place >= GROUP // 2 else byte & 15) - 8) * scale + zero)
        rows.append(numbers)
    return torch.tensor(rows)


@pytest.mark.parametrize("form", QUANTISATIONS.values())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_defined_weights(
    form: type[QuantisedLinear], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    bias = random(shape[0], seed=3).to(dtype)
    matrix = quantise(form, random(*shape), dtype, bias)
    weights = defined(matrix).to(dtype)
    assert torch.equal(matrix.dense(0, shape[0]), weights)
    inputs, hidden = random(5, shape[1], seed=1).to(dtype), random(5, shape[0], seed=2).to(dtype)
    exact = inputs.double() @ weights.double().T + bias
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-4 + 40 * torch.finfo(dtype).eps}
    torch.testing.assert_close(matrix(inputs).double(), exact, **tolerance)
    torch.testing.assert_close(matrix.add(hidden, inputs).double(), exact + hidden, **tolerance)


@pytest.mark.parametrize("form", QUANTISATIONS.values())
@pytest.mark.parametrize("shape", SHAPES)
def test_no_weight_is_further_off_than_its_steps_allow(
    form: type[QuantisedLinear], shape: tuple[int, int]
) -> None:
    weight = random(*shape)
    errors = (quantise(form, weight, torch.float32).dense(0, shape[0]) - weight).abs()
    if form is Int8Linear:
        steps = (weight.abs().amax(dim=1) / 127)[:, None].expand_as(weight)
    elif form is Fp8Linear:  # three bits behind the leading one; below 2^-6, the smallest steps
        scales = weight.abs().amax(dim=1, keepdim=True) / 448 * (1 + 2**-7)
        steps = torch.maximum(weight.abs() / 8, scales * 2**-9)
    else:
        padded = torch.nn.functional.pad(weight, (0, -shape[1] % GROUP)).view(shape[0], -1, GROUP)
        steps = ((padded.amax(-1) - padded.amin(-1)) / 15).repeat_interleave(GROUP, 1)[:, : shape[1]]
    # Half a step, one in 128 more since scales are rounded up; and the rounding of a zero near 0.
    assert (errors <= 0.51 * steps + 2e-3).all()


@pytest.mark.parametrize("form", QUANTISATIONS.values())
def test_parts_fill_a_matrix_as_the_whole_does(
    form: type[QuantisedLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(40, 200).bfloat16()
    whole = quantise(form, weight, torch.bfloat16)
    parts = form.empty(40, 200, bias=False, dtype=torch.bfloat16, device=CPU)
    for limit in ("_SLICE_WEIGHTS", "_PRODUCT_WEIGHTS"):
        monkeypatch.setattr(quantised, limit, 3 * 200)
    for place, part in zip(parts.place.split([17, 3, 20]), torch.split(weight, [17, 3, 20]), strict=True):
        assert place.shape == tuple(part.shape)
        place.copy_(part)
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(parts.scales, whole.scales)
    # Products by slices are the products.
    inputs = random(2, 200).bfloat16()
    sliced = parts(inputs)
    monkeypatch.undo()
    assert torch.equal(sliced, whole(inputs))


@pytest.mark.parametrize("form", QUANTISATIONS.values())
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_takes_the_bytes_it_says(form: type[QuantisedLinear], shape: tuple[int, int]) -> None:
    matrix = form.empty(*shape, bias=False, dtype=torch.float32, device=CPU)
    taken = matrix.weight.nbytes + matrix.scales.nbytes
    assert form.bytes_for(*shape, torch.float32) == matrix.place.nbytes == taken


@pytest.mark.parametrize("form", QUANTISATIONS.values())
@pytest.mark.parametrize("number", [0.0, 1.0, -2.5])
def test_weights_that_are_all_the_same(form: type[QuantisedLinear], number: float) -> None:
    matrix = quantise(form, torch.full((3, 2 * GROUP), number), torch.float32)
    torch.testing.assert_close(matrix.dense(0, 3), torch.full((3, 2 * GROUP), number), rtol=1 / 128, atol=0.0)


@pytest.mark.parametrize("form", QUANTISATIONS.values())
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_are_refused(form: type[QuantisedLinear], number: float) -> None:
    weight = random(4, 130)
    weight[2, 129] = number
    with pytest.raises(ValueError, match="not finite"):
        quantise(form, weight, torch.float32)
