"""Weight matrices and the products with them: one class for each form that a matrix may have on a device.

A model holds `Linear` objects and never multiplies by itself: `Operations` do, in the way that suits the
form. A plain matrix is a tensor as the checkpoint has it. Every other form is a subclass with its own
products, which a `Backend` puts in the place of the plain one.
"""

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from triton_models.engine.quantised import QuantisedRows

_OUT, _IN = 80, 48
"""Shape of the matrix for the trial: small, and not a multiple of a large tile."""

_TOLERANCE = 0.05
"""Largest error, relative to the largest result. bfloat16 has 0.01; a misread matrix has over 1."""


class Linear:
    """A weight matrix, [N, K], and a bias, [N], or None; multiplied in plain torch, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def bytes_for(cls, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes of a matrix without bias."""
        return rows * columns * dtype.itemsize

    @classmethod
    def empty(cls, rows: int, columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Self:
        """Return a matrix to be filled: `bias`, if there is one, and what is at `place`."""
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        return cls(weight, torch.empty(rows, dtype=dtype, device=device) if bias else None)

    @property
    def place(self) -> "Tensor | QuantisedRows":
        """What the checkpoint's tensor is copied to: the weight, or what turns a copy into it."""
        return self.weight

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`: [T, K] gives [T, N]."""
        return functional.linear(inputs, self.weight, self.bias)

    def add(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return `hidden + inputs @ weight.T + bias`: [T, N] and [T, K] give [T, N]."""
        return hidden + self(inputs)


class PackedLinear(Linear):
    """A matrix rearranged once for a CPU's products, instead of in every product.

    The libraries that torch multiplies with (oneDNN; MKL for float32) take a matrix as the checkpoint has it
    and rearrange it in every product on the way into registers. With the few rows of a decode step, that
    costs more than the product itself; a prepacked matrix is only read. The arithmetic is the same except for
    the order of sums. `weight` is opaque, and hardly larger than the plain one.
    """

    def __init__(self, plain: Linear) -> None:
        reorder = _mkldnn()._reorder_linear_weight  # noqa: SLF001 - its only name
        super().__init__(reorder(plain.weight, None), plain.bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`: [T, K] gives [T, N]."""
        product: Tensor = _products().default(inputs, self.weight, self.bias, "none", [], "")
        return product

    def add(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return `hidden + inputs @ weight.T + bias`; in 16 bits the sum is rounded only once."""
        total: Tensor = _products().binary(inputs, hidden, self.weight, self.bias, "add")
        return total


def pack(matrix: Linear) -> Linear:
    """Return a plain matrix in its packed form; another one as it is."""
    return PackedLinear(matrix) if type(matrix) is Linear else matrix


def why_not_packed(dtype: torch.dtype) -> str | None:
    """Try the products on this machine; return the obstacle, or None if they work.

    Only the library knows which CPUs support which dtype, and torch uses these operators itself but does not
    document them.
    """
    generator = torch.Generator().manual_seed(0)
    weight, inputs, hidden = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((_OUT, _IN), (3, _IN), (3, _OUT))
    )
    try:
        found = [
            PackedLinear(Linear(weight, hidden[0]))(inputs),
            PackedLinear(Linear(weight)).add(hidden, inputs),
        ]
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    product = functional.linear(inputs.float(), weight.float())
    for given, expected in zip(found, (product + hidden[0], product + hidden), strict=True):
        if (given - expected).abs().max() > _TOLERANCE * expected.abs().max():
            return "its products are wrong here"
    return None


def _products() -> Any:
    return _mkldnn()._linear_pointwise  # noqa: SLF001 - its only name


def _mkldnn() -> Any:
    return torch.ops.mkldnn
