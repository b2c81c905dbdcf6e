"""What the engine may use, and how much KV cache that comes to."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf

import torch

from triton_models.engine.memory import GIB, free_bytes, total_bytes
from triton_models.engine.model import CausalModel
from triton_models.errors import SettingsError

GPU_SHARE = 0.95
"""Of the device memory that is free beside the weights and what steps need; the rest is for fragments."""

CPU_SHARE = 0.25
"""Of the available main memory; pages are only taken once a block is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of one engine.

    Raises:
        SettingsError: a value out of range, or a contradiction.
    """

    max_context: int | None = None
    """Prompt and answer together, in tokens; None: the model's own."""
    max_running: int = 128
    """Sequences in one step."""
    max_waiting: int = 512
    """Requests open beyond `max_running`; one more is refused."""
    max_batched_tokens: int = 1024
    """Tokens in one step: what is left beside the decodes computes prompts, in chunks."""
    burst_tokens: int | None = None
    """Tokens in one step while several prompts wait that fill it; never fewer than in any other."""
    burst_steps: int = 0
    """Such steps in a row in which decodes may stand back for a burst (see bursts.py); 0: never."""
    block_size: int = 16
    """Tokens in one KV block."""
    kv_blocks: int | None = None
    """KV blocks; None: by memory."""
    kv_memory_gib: float | None = None
    """Memory for KV blocks, in GiB; None: a share of what is free."""
    prefix_cache: bool = True
    """Sequences that begin with the same tokens share the KV blocks of these."""
    failure_limit: int = 3
    """Failed steps in a row after which the engine stops."""

    def __post_init__(self) -> None:
        """Check ranges."""
        lowest = {"max_waiting": 0, "burst_steps": 0, "max_context": 2}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in {"kv_memory_gib", "prefix_cache"} or value is None:
                continue
            if value < lowest.get(field.name, 1):
                raise SettingsError(f"{field.name} must be at least {lowest.get(field.name, 1)}, not {value}")
        if self.kv_memory_gib is not None and not 0 < self.kv_memory_gib < inf:
            raise SettingsError(f"kv_memory_gib must be over 0 and finite, not {self.kv_memory_gib}")
        if self.kv_blocks is not None and self.kv_memory_gib is not None:
            raise SettingsError("kv_blocks and kv_memory_gib exclude each other")
        if self.max_batched_tokens < self.max_running:
            raise SettingsError(
                f"max_batched_tokens {self.max_batched_tokens} is under max_running {self.max_running}:"
                " a step must have room for a token of every running sequence"
            )

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step there can be."""
        return max(self.max_batched_tokens, self.burst_tokens or 0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the settings come to on this machine with this model."""

    kv_blocks: int
    max_context: int
    """Tokens of prompt and answer that one sequence may have."""
    reason: str
    """How they were chosen, for the log."""


def choose_capacity(
    settings: EngineSettings, model: CausalModel, beside_cache: Callable[[], int] = lambda: 0
) -> Capacity:
    """Choose the number of KV blocks and the longest sequence they and the model allow.

    Args:
        settings: what was asked for.
        model: where its cache will be.
        beside_cache: finds out how many bytes of a GPU steps need for themselves; only asked where the blocks
            are to take what is left.

    Raises:
        SettingsError: the context exceeds the model's, not even one block fits, or the device has no room for
            what was asked.
    """
    context = settings.max_context or model.max_positions
    if context > model.max_positions:
        raise SettingsError(f"max_context {context} exceeds the {model.max_positions} positions of the model")
    blocks, reason = _choose_blocks(settings, model, context, beside_cache)
    needed = blocks * settings.block_size * model.kv_shape.bytes_per_token(model.dtype)
    if needed > (there := total_bytes(model.device)):
        raise SettingsError(
            f"{blocks} KV blocks ({reason}) take {needed / GIB:,.1f} GiB,"
            f" and {model.device} has {there / GIB:,.1f}"
        )
    held = blocks * settings.block_size
    if held < context:
        reason += f"; the context is {held} instead of {context} tokens, which is all the blocks hold"
        context = held
    return Capacity(blocks, context, f"{blocks} KV blocks of {settings.block_size} tokens: {reason}")


def _choose_blocks(
    settings: EngineSettings, model: CausalModel, context: int, beside_cache: Callable[[], int]
) -> tuple[int, str]:
    if settings.kv_blocks is not None:
        return settings.kv_blocks, "kv_blocks was set"
    block_bytes = settings.block_size * model.kv_shape.bytes_per_token(model.dtype)
    if settings.kv_memory_gib is not None:
        memory = int(settings.kv_memory_gib * GIB)
        reason = f"{settings.kv_memory_gib} GiB were set"
    else:
        memory, reason = _usable_memory(model.device, beside_cache)
    fitting = memory // block_bytes
    if fitting < 1:
        raise SettingsError(f"a KV block takes {block_bytes} bytes and {memory} are there ({reason})")
    usable = settings.max_running * -(-context // settings.block_size)
    if fitting >= usable:
        return usable, f"all that {settings.max_running} sequences of {context} tokens can use ({reason})"
    return fitting, reason


def _usable_memory(device: torch.device, beside_cache: Callable[[], int]) -> tuple[int, str]:
    """Return the bytes that KV blocks may take, and why."""
    free = free_bytes(device)
    if device.type == "cuda":
        steps = beside_cache()
        reason = f"{GPU_SHARE:.0%} of {free / GIB:.1f} GiB free on {device}, less {steps / GIB:.1f} for steps"
        return int(max(0, free - steps) * GPU_SHARE), reason
    return int(free * CPU_SHARE), f"{CPU_SHARE:.0%} of {free / GIB:.1f} GiB of main memory left"
