"""The KV cache: keys and values of every block, on the device."""

import torch
from torch import Tensor

from triton_models.engine.block_manager import PADDING_BLOCK
from triton_models.engine.model import KVShape


class KVCache:
    """`keys` and `values`: [layers, blocks + 1, block_size, KV heads, head_dim]; block 0 pads block tables.

    The contents of a block are undefined until it is cleared. A CPU's memory is only taken when blocks are
    first written, a GPU's at once.
    """

    def __init__(
        self, shape: KVShape, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        size = (shape.layers, blocks + 1, block_size, shape.heads, shape.head_dim)
        self.keys = torch.empty(size, dtype=dtype, device=device)
        self.values = torch.empty(size, dtype=dtype, device=device)
        self.reset()

    def clear(self, blocks: Tensor) -> None:
        """Zero `blocks` ([N] int64) when they are allocated.

        Attention reads whole blocks and masks positions beyond a sequence's end, but a NaN left there by an
        earlier sequence would survive multiplication by a weight of zero.
        """
        self.keys.index_fill_(1, blocks, 0)
        self.values.index_fill_(1, blocks, 0)

    def reset(self) -> None:
        """Zero the padding block, which a failed step may have spoilt; others are cleared when allocated."""
        self.keys[:, PADDING_BLOCK] = 0
        self.values[:, PADDING_BLOCK] = 0
