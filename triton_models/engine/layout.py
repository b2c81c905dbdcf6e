"""Which token of a step belongs to which sequence, as attention needs it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """New tokens of one sequence: rows `start` to `end` - 1 of the step, from position `offset` on."""

    slot: int
    start: int
    end: int
    offset: int

    @property
    def length(self) -> int:
        """Number of the sequence's tokens up to the end of the chunk."""
        return self.offset + self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One step's tokens: first the decodes, one token of one sequence each; then the chunks.

    A sequence is named by its slot, the row of `tables` that lists its KV blocks.
    """

    tables: Tensor
    """[slots, blocks] int32."""
    slots: Tensor
    """[T] int32, each token's sequence."""
    positions: Tensor
    """[T] int64, each token's position in its sequence; -1 in padding rows of steps with prompts."""
    decode_lengths: Tensor
    """[D] int32, tokens of each decoding sequence, including the new one; 0 in rows without a decode."""
    longest_decode: int
    """Upper bound of `decode_lengths`: it affects the cost, but not the results."""
    chunks: tuple[ChunkRows, ...] = ()
    tiles: Tensor | None = None
    """[N, 4] int32, what `StepOperations.tiles` made of the chunks; None for a step without any."""
