"""A step's operations on a CPU, where each call of a torch operator costs as much as a small product.

So there are fewer calls than in `PlainOperations`: a rotation is one product of complex numbers, a norm
combines its operations as far as possible, and a residual is added within the product.
"""

from functools import cache

import torch
from torch import Tensor

from triton_models.engine.attention import PlainOperations
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import StepLayout
from triton_models.engine.operations import Rotary, rotation
from triton_models.engine.packed_weights import add_packed_linear


class ProcessorOperations(PlainOperations):
    """One step's `Operations`."""

    def __init__(self, cache: KVCache, layout: StepLayout) -> None:
        super().__init__(cache, layout)
        self._turns: Tensor | None = None

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `Operations`."""
        numbers = hidden.float()
        length: Tensor = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
        # The mean square is the squared length over the width.
        scale = torch.addcmul(_scalar(epsilon), length, length, value=1 / hidden.shape[-1]).rsqrt_()
        return (numbers * scale).mul_(weight).to(hidden.dtype)

    def add_linear(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """See `Operations`."""
        if weight.is_mkldnn:
            return add_packed_linear(hidden, inputs, weight)
        return super().add_linear(hidden, inputs, weight)

    def _rotate(self, heads: Tensor, rotary: Rotary) -> None:
        """Rotate each pair of numbers as one complex number."""
        if self._turns is None:
            self._turns = torch.complex(*rotation(rotary, self.positions))
        count = self._turns.shape[-1]
        pairs = heads[..., : 2 * count].view(*heads.shape[:-1], count, 2)
        numbers = pairs.float()
        torch.view_as_complex(numbers).mul_(self._turns)
        if numbers is not pairs:
            pairs.copy_(numbers)


@cache
def _scalar(number: float) -> Tensor:
    return torch.tensor(number)
