"""The work that the scheduler chose for one step."""

from dataclasses import dataclass, field

from triton_models.engine.sequence import Sequence, SequenceState


# Not frozen: creating a frozen dataclass takes three times as long, and a step creates one per sequence.
@dataclass(slots=True)
class Chunk:
    """`count` tokens of a sequence, from position `start` on, that are computed in this step.

    `samples`: whether they include the sequence's newest token, so that the step samples the next one. This
    is decided when the step is scheduled, since the sequence grows afterwards.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence that are in the KV cache after the step."""
        return self.start + self.count


@dataclass(slots=True)
class Batch:
    """One step's work. `decodes` come first; `new_blocks` were allocated for it and hold stale values."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk, decodes first."""
        return self.decodes + self.prefills

    @property
    def masks_wait(self) -> bool:
        """Whether a token mask must be told a token that is in flight before it can be asked for the next."""
        return any(chunk.sequence.masked and chunk.sequence.in_flight for chunk in self.decodes)

    def advance(self) -> None:
        """Record that the step was launched: steps launched later find its keys and values."""
        for chunk in self.decodes:
            sequence = chunk.sequence
            sequence.computed += 1
            sequence.in_flight += 1
        for chunk in self.prefills:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.samples:
                sequence.in_flight += 1
                sequence.move_to(SequenceState.DECODE)
