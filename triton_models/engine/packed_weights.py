"""Matrices laid out once for a processor's products, instead of anew in every product.

What torch multiplies with (oneDNN; MKL for float32) takes a matrix as the checkpoint has it, and rearranges
it on the way into registers: with the few rows of a decode that costs more than the product itself. A matrix
that already lies as they take it is only read. The arithmetic is the same but for the order of sums.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_OUT, _IN = 80, 48
"""Of the matrix that is tried: small, and no multiple of a large tile."""

_TOLERANCE = 0.05
"""Of a product's largest number: bfloat16 has 0.01, and a matrix that was misread over 1."""


def pack(weight: Tensor) -> Tensor:
    """Return `weight`, [N, K], as `packed_linear` takes it: opaque, and hardly larger."""
    if weight.is_mkldnn:
        return weight
    packed: Tensor = _mkldnn()._reorder_linear_weight(weight, None)  # noqa: SLF001 - its only name
    return packed


def packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `inputs @ weight.T + bias`, of a packed weight."""
    product: Tensor = _products().default(inputs, weight, bias, "none", [], "")
    return product


def add_packed_linear(hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden + inputs @ weight.T`, of a packed weight; in 16 bits it is rounded once only."""
    total: Tensor = _products().binary(inputs, hidden, weight, None, "add")
    return total


def why_not_packed(dtype: torch.dtype) -> str | None:
    """Try the products here and now; returns what is in the way, None if nothing is.

    Which processors do it in which dtype is known to the library alone, and its operators are of those that
    torch uses itself but does not promise.
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
