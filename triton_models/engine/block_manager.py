"""Which KV blocks are in use, and by how many sequences. Knows nothing of what is in them."""

PADDING_BLOCK = 0
"""Never handed out and always zero: what a block table is padded with."""


class BlockManager:
    """Hands out blocks numbered 1 to `blocks`, each of `block_size` tokens, with a reference count.

    Every operation costs as much as the blocks it names, however large the cache is. Asking for more than is
    free, or giving back what is not held, is a fault of the caller: RuntimeError.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        # A stack: the block freed last is the likeliest to be in a processor cache still.
        self._free = list(range(blocks, PADDING_BLOCK, -1))
        self._references = [0] * (blocks + 1)

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks that somebody holds."""
        return self.blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """Return how many holders a block has."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder."""
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks were asked for and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`, which must be held already."""
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"KV block {block} is not held")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Take a holder from each of `blocks`; a block without one is free."""
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"KV block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
