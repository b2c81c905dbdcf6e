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
        self.begun: dict[Sequence, list[int]] = {}
        """The blocks with which each sequence began to run last."""

    def compute(self, step: Step) -> list[tuple[Sequence, int]]:
        """Do a step; returns what it samples, but for what follows a wrong guess."""
        self.copy_and_clear(step)
        for chunk in step.prefills:
            self.begin(chunk, step)
        for chunk in step.chunks:
            text = [*self.texts[chunk.sequence], *chunk.guesses]
            for position in range(chunk.start, chunk.end):
                cell = self.cell(chunk, position)
                # Cleared and never written since: so nobody writes to what another wrote, or twice.
                assert cell not in self.cells
                self.cells[cell] = tuple(text[: position + 1])
        sampled = []
        for chunk in step.chunks:
            text = self.texts[chunk.sequence]
            guessed = [*text, *chunk.guesses]
            for position in range(chunk.end):
                assert self.cells[self.cell(chunk, position)] == tuple(guessed[: position + 1])
            if chunk.samples:
                assert chunk.end == len(guessed)
                for guess in (*chunk.guesses, None):
                    text.append(next_token(text))
                    sampled.append((chunk.sequence, text[-1]))
                    if guess != text[-1]:
                        break
                # Behind the newest token, whose cell is the next step's to write, are wrong guesses.
                for position in range(len(text) - 1, chunk.end):
                    del self.cells[self.cell(chunk, position)]
        return sampled

    def copy_and_clear(self, step: Step) -> None:
        """Give copies what their sources hold, but for what is behind the tokens that they are made for."""
        copies = {target: source for source, target in step.copies}
        kept = {
            (chunk.sequence.blocks[chunk.start // BLOCK_SIZE], offset)
            for chunk in step.prefills
            for offset in range(chunk.start % BLOCK_SIZE)
        }
        assert not copies.keys() & set(step.new_blocks)
        copied = {cell: self.cells[copies[cell[0]], cell[1]] for cell in kept if cell[0] in copies}
        stale = {*step.new_blocks, *copies}
        self.cells = {cell: text for cell, text in self.cells.items() if cell[0] not in stale} | copied

    def begin(self, chunk: Chunk, step: Step) -> None:
        """Forget what another left behind the part of a block that a sequence which begins takes from it.

        If somebody needed that, `compute` would miss it later.
        """
        blocks = chunk.sequence.blocks
        if self.begun.get(chunk.sequence) is blocks:
            return
        self.begun[chunk.sequence] = blocks
        first, offset = blocks[chunk.start // BLOCK_SIZE], chunk.start % BLOCK_SIZE
        if first in step.new_blocks or first in dict(step.copies).values():
            return
        for place in range(offset, BLOCK_SIZE):
            self.cells.pop((first, place), None)

    def cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
