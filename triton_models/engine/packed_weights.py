"""Weight matrices rearranged once for a CPU's matrix products, instead of in every product.

The libraries that torch multiplies with (oneDNN; MKL for float32) take a matrix as the checkpoint has it and
rearrange it in every product on the way into registers. With the few rows of a decode step, that costs more
than the product itself; a prepacked matrix is only read. The arithmetic is the same except for the order of
sums.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_OUT, _IN = 80, 48
"""Shape of the matrix for the trial: small, and not a multiple of a large tile."""

_TOLERANCE = 0.05
"""Largest error, relative to the largest result. bfloat16 has 0.01; a misread matrix has over 1."""


def pack(weight: Tensor) -> Tensor:
    """Return `weight`, [N, K], in the form that `packed_linear` takes: opaque, and hardly larger."""
    if weight.is_mkldnn:
        return weight
    packed: Tensor = _mkldnn()._reorder_linear_weight(weight, None)  # noqa: SLF001 - its only name
    return packed


def packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `inputs @ weight.T + bias` for a packed weight."""
    product: Tensor = _products().default(inputs, weight, bias, "none", [], "")
    return product


def add_packed_linear(hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden + inputs @ weight.T` for a packed weight; in 16 bits the sum is rounded only once."""
    total: Tensor = _products().binary(inputs, hidden, weight, None, "add")
    return total


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
        packed = pack(weight)
        found = [packed_linear(inputs, packed, hidden[0]), add_packed_linear(hidden, inputs, packed)]
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    product = linear(inputs.float(), weight.float())
    for given, expected in zip(found, (product + hidden[0], product + hidden), strict=True):
        if (given - expected).abs().max() > _TOLERANCE * expected.abs().max():
            return "its products are wrong here"
    return None


def _products() -> Any:
    return _mkldnn()._linear_pointwise  # noqa: SLF001 - its only name


def _mkldnn() -> Any:
    return torch.ops.mkldnn
