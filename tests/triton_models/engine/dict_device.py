"""A device of dicts: what a step may read and write of the KV cache, held to account."""

from collections.abc import Sequence as Tokens

from triton_models.engine.sequence import Chunk, Sequence
from triton_models.engine.step import Step

BLOCK_SIZE = 4


def next_token(tokens: Tokens[int]) -> int:
    """Few values, so that answers often go on alike."""
    return (3 * len(tokens) + sum(tokens)) % 2


class DictDevice:
    """Cells of the KV cache, each with the whole text up to its token: what keys and values depend on."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.texts: dict[Sequence, list[int]] = {}
        """What each sequence's tokens are, those in flight included."""

    def compute(self, step: Step) -> list[tuple[Sequence, int]]:
        """Do a step; returns what it samples."""
        cleared = set(step.new_blocks)
        self.cells = {cell: text for cell, text in self.cells.items() if cell[0] not in cleared}
        for chunk in step.chunks:
            text = self.texts[chunk.sequence]
            for position in range(chunk.start, chunk.end):
                cell = self.cell(chunk, position)
                # Cleared and never written since: so nobody writes to what another wrote, or twice.
                assert cell not in self.cells
                self.cells[cell] = tuple(text[: position + 1])
        sampled = []
        for chunk in step.chunks:
            text = self.texts[chunk.sequence]
            for position in range(chunk.end):
                assert self.cells[self.cell(chunk, position)] == tuple(text[: position + 1])
            if chunk.samples:
                assert chunk.end == len(text)
                text.append(next_token(text))
                sampled.append((chunk.sequence, text[-1]))
        return sampled

    def cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
