"""Which token of a step belongs to which sequence, as attention needs it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Several new tokens of one sequence: rows `start` to `end` of the step, positions `offset` onwards."""

    slot: int
    start: int
    end: int
    offset: int

    @property
    def length(self) -> int:
        """Tokens of the sequence with the chunk's."""
        return self.offset + self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One step's tokens: first the decodes, one token of one sequence each; chunks follow.

    A sequence is named by its slot, the row of `tables` that lists its KV blocks.
    """

    tables: Tensor
    """[slots, blocks] int32."""
    slots: Tensor
    """[T] int32, each token's sequence."""
    positions: Tensor
    """[T] int64, each token's place in its sequence; -1 for rows that fill a step up."""
    decode_lengths: Tensor
    """[D] int32, tokens of each sequence that decodes, the new one included; 0 for rows that are none."""
    longest_decode: int
    """No sequence that decodes has more tokens; costs depend on it, results do not."""
    chunks: tuple[ChunkRows, ...] = ()
    tiles: Tensor | None = None
    """[N, 4] int32, what `StepOperations.tiles` made of the chunks; None for a step without any."""
