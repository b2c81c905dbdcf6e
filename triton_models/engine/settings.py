"""The engine's limits."""

from dataclasses import dataclass, fields
from math import inf

from triton_models.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of one engine.

    Raises:
        SettingsError: a value out of range, or a contradiction.
    """

    max_context: int | None = None
    """Prompt and answer together, in tokens; None: the model's own."""
    max_running: int = 128
    """Most sequences in one step."""
    max_waiting: int = 512
    """Most open requests beyond `max_running`; further ones are refused."""
    max_batched_tokens: int = 1024
    """Most tokens in one step; what the decodes leave is used for chunks of prompts."""
    burst_tokens: int | None = None
    """Most tokens in one step while several waiting prompts fill it, if more than `max_batched_tokens`."""
    burst_steps: int = 0
    """Most consecutive steps in which a burst runs without decodes (see `BurstAllowance`); 0: none."""
    block_size: int = 16
    """Tokens in one KV block."""
    kv_blocks: int | None = None
    """Number of KV blocks; None: what the memory allows."""
    kv_memory_gib: float | None = None
    """Memory for KV blocks, in GiB; None: a share of what is free."""
    memory_share: float | None = None
    """Share of the device's memory that is this engine's, weights included, where other engines start on the
    same device; None: what is free."""
    draft_tokens: int = 8
    """Most guesses at one sequence's next tokens in a step (see `Drafter`); 0: none."""
    failure_limit: int = 3
    """Consecutive failed steps after which the engine stops."""

    def __post_init__(self) -> None:
        """Check ranges."""
        lowest = {"max_waiting": 0, "burst_steps": 0, "draft_tokens": 0, "max_context": 2}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in {"kv_memory_gib", "memory_share"} or value is None:
                continue
            if value < lowest.get(field.name, 1):
                raise SettingsError(f"{field.name} must be at least {lowest.get(field.name, 1)}, not {value}")
        if self.kv_memory_gib is not None and not 0 < self.kv_memory_gib < inf:
            raise SettingsError(f"kv_memory_gib must be over 0 and finite, not {self.kv_memory_gib}")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise SettingsError(f"memory_share must be over 0 and at most 1, not {self.memory_share}")
        if self.kv_blocks is not None and self.kv_memory_gib is not None:
            raise SettingsError("kv_blocks and kv_memory_gib exclude each other")
        if self.max_batched_tokens < self.max_running:
            raise SettingsError(
                f"max_batched_tokens {self.max_batched_tokens} is under max_running {self.max_running}:"
                " a step must have room for a token of every running sequence"
            )

    @property
    def largest_step(self) -> int:
        """Tokens of the largest possible step."""
        return max(self.max_batched_tokens, self.burst_tokens or 0)
