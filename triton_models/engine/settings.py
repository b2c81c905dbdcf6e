"""The engine's limits."""

from dataclasses import dataclass
from typing import Final

from triton_models.errors import SettingsError

BLOCK_TOKENS: Final = 16
"""Few, so that little is left of a block that is not full, and texts that begin alike share most of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of one engine, each within the range of its option (`wire.options`).

    Raises:
        SettingsError: `max_batched_tokens` is less than `max_running`.
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
    """Most tokens in one step while six such steps of prompts wait, if more than `max_batched_tokens`."""
    burst_steps: int = 0
    """Most consecutive steps in which a burst runs without decodes (see `BurstAllowance`); 0: none."""
    block_size: int | None = None
    """Tokens in one KV block; None: what suits the device."""
    kv_blocks: int | None = None
    """Number of KV blocks, whatever `kv_memory_gib` says; None: what the memory allows."""
    kv_memory_gib: float | None = None
    """Memory for KV blocks, in GiB; None: a share of what is free."""
    memory_share: float | None = None
    """Share of the device's memory that is this engine's, weights included, where other engines start on the
    same device; None: what is free."""
    draft_tokens: int = 16
    """Most guesses at one sequence's next tokens in a step (see `Drafter`); 0: none."""
    failure_limit: int = 3
    """Consecutive failed steps after which the engine stops."""

    def __post_init__(self) -> None:
        """Check that a step can hold what may run."""
        if self.max_batched_tokens < self.max_running:
            raise SettingsError(
                f"max_batched_tokens {self.max_batched_tokens} is under max_running {self.max_running}:"
                " a step must have room for a token of every running sequence"
            )

    @property
    def block_tokens(self) -> int:
        """`block_size`; 16 where neither the settings nor the engine have chosen one."""
        return self.block_size or BLOCK_TOKENS

    @property
    def largest_step(self) -> int:
        """Tokens of the largest possible step."""
        return max(self.max_batched_tokens, self.burst_tokens or 0)
