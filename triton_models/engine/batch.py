"""What the scheduler chose for one step."""

from dataclasses import dataclass, field

from triton_models.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence, computed in this step, from `start` on.

    `samples`: they reach the sequence's newest token, so the step samples the next one.
    """

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are in the KV cache after the step."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """True if the step samples a token behind this chunk."""
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True)
class Batch:
    """One step's work. `decodes` go first; `new_blocks` were handed out for it and hold stale numbers."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk, decodes first."""
        return self.decodes + self.prefills
