"""What the engine reports about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step."""

    batch_size: int
    """Sequences in the step."""
    prefill_tokens: int
    decode_tokens: int
    """Tokens of decoding sequences that became part of an answer."""
    seconds: float
    """From scheduling to sampled tokens."""
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    preemptions: int
    """Since the engine was built."""
    failed_steps: int
    """Since the engine was built."""
