"""The engine's limits, and the size of the KV cache that follows from them."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf

import torch

from triton_models.engine.memory import GIB, free_bytes, total_bytes
from triton_models.engine.model import CausalModel
from triton_models.errors import SettingsError

GPU_SHARE = 0.95
"""Share of the GPU memory left by weights and steps that KV blocks take; the rest is for fragmentation."""

CPU_SHARE = 0.25
"""Share of the available main memory that KV blocks take; memory pages are only used once a block is."""


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
    """Most consecutive steps in which a burst runs without decodes (see bursts.py); 0: none."""
    block_size: int = 16
    """Tokens in one KV block."""
    kv_blocks: int | None = None
    """Number of KV blocks; None: what the memory allows."""
    kv_memory_gib: float | None = None
    """Memory for KV blocks, in GiB; None: a share of what is free."""
    prefix_cache: bool = True
    """Whether sequences that begin with the same tokens share the KV blocks of these."""
    failure_limit: int = 3
    """Consecutive failed steps after which the engine stops."""

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
        """Tokens of the largest possible step."""
        return max(self.max_batched_tokens, self.burst_tokens or 0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the settings result in on this machine with this model."""

    kv_blocks: int
    max_context: int
    """Most tokens of prompt and answer that one sequence may have."""
    reason: str
    """How these were chosen, for the log."""


def choose_capacity(
    settings: EngineSettings, model: CausalModel, beside_cache: Callable[[], int] = lambda: 0
) -> Capacity:
    """Choose the number of KV blocks and the longest sequence they and the model allow.

    Args:
        settings: the limits asked for.
        model: the model whose cache it is, on its device.
        beside_cache: measures how many bytes of a GPU the steps themselves need; only called if the number of
            blocks depends on the free memory of a GPU.

    Raises:
        SettingsError: the context exceeds the model's, not even one block fits, or the device is too small
            for what was asked for.
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
