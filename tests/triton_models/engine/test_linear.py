import pytest
import torch

from triton_models.engine import linear
from triton_models.engine.linear import Linear, PackedLinear, pack, why_not_packed
from triton_models.engine.quantised import Int8Linear

DTYPES = [
    pytest.param(
        dtype, marks=pytest.mark.skipif(why_not_packed(dtype) is not None, reason="not on this processor")
    )
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inner"), [(1, 1), (7, 33), (64, 64), (130, 257)])
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 70])
def test_products_of_any_shape_are_those_of_the_plain_matrix(
    dtype: torch.dtype, width: int, inner: int, rows: int
) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(width, inner).to(dtype), torch.randn(width).to(dtype)
    inputs, hidden = torch.randn(rows, inner).to(dtype), torch.randn(rows, width).to(dtype)
    product = inputs.double() @ weight.double().T
    packed, biased = PackedLinear(Linear(weight)), PackedLinear(Linear(weight, bias))
    assert packed.weight.shape == weight.shape
    # One rounding, and that of sums in float32.
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-3}
    for given, expected in (
        (packed(inputs), product),
        (biased(inputs), product + bias),
        (packed.add(hidden, inputs), product + hidden),
    ):
        assert given.dtype == dtype
        torch.testing.assert_close(given.double(), expected, **tolerance)


def test_only_plain_matrices_are_packed() -> None:
    packed = pack(Linear(torch.ones(4, 4)))
    assert isinstance(packed, PackedLinear)
    assert pack(packed) is packed
    quantised = Int8Linear.empty(4, 32, bias=False, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert pack(quantised) is quantised


def test_a_dtype_without_such_products_is_told() -> None:
    assert why_not_packed(torch.float64)


@pytest.mark.parametrize(
    "fault", [RuntimeError("no such processor\nC++ frames"), AttributeError("no such name")]
)
def test_a_build_without_such_products_is_told(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr(linear, "_mkldnn", fail)
    assert why_not_packed(torch.float32) == str(fault).splitlines()[0]


def test_wrong_products_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "add", lambda self, hidden, inputs: hidden)
    assert why_not_packed(torch.float32) == "its products are wrong here"
