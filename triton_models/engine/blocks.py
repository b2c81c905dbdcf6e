"""The KV cache in blocks: who holds which, and the tensors that hold their keys and values."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from triton_models.engine.models import KVShape

PADDING_BLOCK = 0
"""Never allocated: block tables are padded with it.

It holds zeros, except in its first position: rows of the spare slot, which pad a step, write there. Backends
whose attention computes with masked positions (`clears_blocks`) never pad steps this way.
"""


class BlockManager:
    """Hands out blocks numbered 1 to `blocks`, each of `block_size` tokens, with a reference count.

    A block is *used* while it has holders. Without any it is *free*, or *cached* if its contents were
    declared worth keeping: then it can be held again unchanged, until it is needed for something else. Cached
    blocks are evicted when no free one is left, the least recently released first, and `on_eviction` is
    called.

    The cost of every operation depends only on the number of blocks it names. Asking for more than is
    available, or giving back what is not held, is a bug in the caller: RuntimeError.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.on_eviction: Callable[[int], None] = _ignore
        # A stack: the block freed last is the most likely to be still in a CPU cache.
        self._free = list(range(blocks, PADDING_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self._kept = [False] * (blocks + 1)
        self._references = [0] * (blocks + 1)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Number of blocks with holders."""
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """Return the number of holders of a block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` available blocks, each with one holder."""
        if count > self.available:
            raise RuntimeError(f"{count} KV blocks were requested and {self.available} are available")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of `blocks`, which must be held or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise _not_held(block)
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove a holder from each of `blocks`, the last first, so that a chain is evicted from its end."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise _not_held(block)
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Declare the contents of a held block worth keeping: without holders, it will be cached."""
        if self._references[block] < 1:
            raise _not_held(block)
        self._kept[block] = True

    def discard(self, block: int) -> None:
        """Undo `keep`."""
        self._kept[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = False
        self.on_eviction(block)
        return block


def _not_held(block: int) -> RuntimeError:
    return RuntimeError(f"KV block {block} is not held")


def _ignore(block: int) -> None:
    """Do nothing: the default of `on_eviction`."""


class KVCache:
    """`keys` and `values`: [layers, blocks + 1, block_size, KV heads, head_dim]; block 0 pads block tables.

    The contents of a block are undefined until it is cleared. A CPU's memory is only taken when blocks are
    first written, a GPU's at once.
    """

    def __init__(
        self, shape: KVShape, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._shape = shape
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.allocate(blocks)

    def allocate(self, blocks: int) -> None:
        """Replace the tensors by new ones for `blocks` blocks."""
        shape = self._shape
        size = (shape.layers, blocks + 1, self.block_size, shape.heads, shape.head_dim)
        self.keys = self._like.new_empty(size)
        self.values = self._like.new_empty(size)
        self.reset()

    def clear(self, blocks: Tensor) -> None:
        """Zero `blocks` ([N] int64) when they are allocated.

        Attention reads whole blocks and masks positions beyond a sequence's end, but a NaN left there by an
        earlier sequence would survive multiplication by a weight of zero.
        """
        self.keys.index_fill_(1, blocks, 0)
        self.values.index_fill_(1, blocks, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give the blocks `targets` what `sources` hold now, block by block; both are [N] int64."""
        for cache in (self.keys, self.values):
            for layer in cache:  # one by one: what is copied of all may be large
                layer[targets] = layer[sources]

    def reset(self) -> None:
        """Zero the padding block, which a failed step may have written to; others are cleared before use."""
        self.keys[:, PADDING_BLOCK] = 0
        self.values[:, PADDING_BLOCK] = 0
