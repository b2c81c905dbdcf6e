"""How large the KV cache can be: a device's memory, less what the engine's steps need besides."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from triton_models.engine.graphs import LARGEST_PROMPTS
from triton_models.engine.models import CausalModel
from triton_models.engine.scoring import SLICE_ROWS
from triton_models.engine.settings import EngineSettings
from triton_models.errors import SettingsError

log = logging.getLogger(__name__)

GIB: Final = 2**30

GPU_SHARE = 0.95
"""Share of the GPU memory left by weights and steps that KV blocks take; the rest is for fragmentation."""

CPU_SHARE = 0.25
"""Share of the available main memory that KV blocks take; memory pages are only used once a block is."""

GRAPH_BYTES = 2 * 2**20
"""A generous estimate of what a driver keeps per captured graph of some hundreds of kernels."""

LOGITS_COPIES = 10
"""Float32 copies of each logit in a step whose rows all ask for penalties, biases and log-probabilities."""

CONTEXT_BYTES = 2**30
"""A generous estimate of what the driver, libraries and kernels take of a GPU for one process."""

_SCORES_COPIES = 4
"""Float32 copies of each logit in a slice of a prompt whose log-probabilities are requested."""

_CGROUP = Path("/sys/fs/cgroup")
"""This process's cgroup as seen in a container (cgroup v2)."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the settings result in on this machine with this model."""

    kv_blocks: int
    max_context: int
    """Most tokens of prompt and answer that one sequence may have."""
    reason: str
    """How these were chosen, for the log."""


def longest_context(settings: EngineSettings, model: CausalModel) -> int:
    """Return the most tokens that one sequence may have if the KV cache holds them.

    Raises:
        SettingsError: `max_context` exceeds what the model can.
    """
    context = settings.max_context or model.max_positions
    if context > model.max_positions:
        raise SettingsError(f"max_context {context} exceeds the {model.max_positions} positions of the model")
    return context


def choose_capacity(
    settings: EngineSettings, model: CausalModel, run_largest: Callable[[], int] = lambda: 0
) -> Capacity:
    """Choose the number of KV blocks and the longest sequence they and the model allow.

    Args:
        settings: the requested limits.
        model: the model whose cache it is, on its device.
        run_largest: runs the engine's largest steps, with everything allocated but the cache, and returns how
            many graphs there will be. Only called if the number of blocks depends on the free memory of a
            GPU.

    Raises:
        SettingsError: the context exceeds the model's, not even one block fits, or the device is too small
            for what was requested.
    """
    context = longest_context(settings, model)
    blocks, reason = _choose_blocks(settings, model, context, run_largest)
    needed = blocks * settings.block_tokens * model.kv_shape.bytes_per_token(model.dtype)
    if needed > (there := total_bytes(model.device)):
        raise SettingsError(
            f"{blocks} KV blocks ({reason}) take {needed / GIB:,.1f} GiB,"
            f" and {model.device} has {there / GIB:,.1f}"
        )
    held = blocks * settings.block_tokens
    if held < context:
        reason += f"; the context is {held} instead of {context} tokens, which is all the blocks hold"
        context = held
    return Capacity(blocks, context, f"{blocks} KV blocks of {settings.block_tokens} tokens: {reason}")


def _choose_blocks(
    settings: EngineSettings, model: CausalModel, context: int, run_largest: Callable[[], int]
) -> tuple[int, str]:
    if settings.kv_blocks is not None:
        return settings.kv_blocks, "kv_blocks was set"
    block_bytes = settings.block_tokens * model.kv_shape.bytes_per_token(model.dtype)
    if settings.kv_memory_gib is not None:
        memory = int(settings.kv_memory_gib * GIB)
        reason = f"{settings.kv_memory_gib} GiB were set"
    else:
        device = model.device
        share = settings.memory_share or 1.0
        free = free_bytes(device, share)
        if device.type == "cuda":
            steps = needed_bytes(profile_steps(run_largest, device, share), settings, model.vocab_size)
            memory = int(max(0, free - steps) * GPU_SHARE)
            reason = (
                f"{GPU_SHARE:.0%} of {free / GIB:.1f} GiB free on {device}, less {steps / GIB:.1f} for steps"
            )
        else:
            memory = int(free * CPU_SHARE)
            reason = f"{CPU_SHARE:.0%} of {free / GIB:.1f} GiB of main memory left"
        if share < 1:
            reason += f"; a share of {share:.2g}, since other models have the rest"
    fitting = memory // block_bytes
    if fitting < 1:
        raise SettingsError(f"a KV block takes {block_bytes} bytes and {memory} are there ({reason})")
    usable = settings.max_running * -(-context // settings.block_tokens)
    if fitting >= usable:
        return usable, f"all that {settings.max_running} sequences of {context} tokens can use ({reason})"
    return fitting, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What running the largest steps took, in bytes; `graphs` is the number of graphs to be captured."""

    held: int
    """No longer free after the steps have run: workspaces, libraries, kernels, and what the allocator keeps
    of the activations."""
    activations: int
    """The most that a step took temporarily."""
    graphs: int


def profile_steps(run_largest: Callable[[], int], device: torch.device, share: float = 1.0) -> Profile:
    """Run the largest steps once on a GPU, and measure.

    The runner is the one that will serve, with everything allocated but the KV cache. So what is free before
    excludes its tables, and `held` does not count them. Nothing is given back afterwards: the allocator goes
    on holding just what was measured, and the same steps find it again when they are captured.

    Args:
        run_largest: runs them, and returns how many graphs there will be.
        device: a GPU.
        share: of it, as in `free_bytes`.
    """
    before = free_bytes(device, share)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    graphs = run_largest()
    # The peak is counted when memory is requested, but kernels and libraries are loaded as the device runs.
    torch.cuda.synchronize(device)
    return Profile(
        held=before - free_bytes(device, share),
        activations=torch.cuda.max_memory_allocated(device) - allocated,
        graphs=graphs,
    )


def needed_bytes(profile: Profile, settings: EngineSettings, vocabulary: int) -> int:
    """Return how many bytes the KV cache must leave of what was free before the profile run.

    Besides `held`, these are for the graphs, whose activations have a pool of their own, and for steps that
    need more than those of the profile run: with more prompt tokens than are captured, with every sampling
    rule, or with log-probabilities of prompts. These three never use their memory at the same time.
    """
    activations = profile.activations
    prompts = activations * max(settings.largest_step, LARGEST_PROMPTS) // LARGEST_PROMPTS
    logits = max(LOGITS_COPIES * settings.max_running, _SCORES_COPIES * SLICE_ROWS)
    sampling = logits * vocabulary * torch.float32.itemsize
    pool = activations + profile.graphs * GRAPH_BYTES if profile.graphs else 0
    needed = profile.held + pool + max(0, prompts - activations, sampling - activations)
    log.info("steps need %.2f GiB beside weights, tables and KV cache: %s", needed / GIB, profile)
    return needed


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """Return how many bytes this process can still allocate on `device`.

    With a `share` under 1, within that share of a GPU, by what this process holds itself: others that start
    at the same time change what is free, and take what is theirs later. On a CPU, that share of what is free.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if share < 1:
            free = min(free, int(share * total) - torch.cuda.memory_reserved(device) - CONTEXT_BYTES)
        return free
    return int(share * _free_main_memory())


def _free_main_memory() -> int:
    machine = _meminfo("MemAvailable:")
    limit = _container_limit()
    if limit is None:
        return machine
    used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    # Files that were read, as the checkpoint was, stay in memory only until it is needed.
    used -= _line(_CGROUP / "memory.stat", "inactive_file")
    return min(machine, max(0, limit - used))


def total_bytes(device: torch.device) -> int:
    """Return the total bytes of `device`, swap space included, whether in use or free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = _meminfo("MemTotal:") + _meminfo("SwapTotal:")
    return min(machine, _container_limit() or machine)


def _meminfo(key: str) -> int:
    return _line(Path("/proc/meminfo"), key) * 1024


def _line(path: Path, key: str) -> int:
    """Return the number behind `key` in a file of keys and numbers."""
    with path.open(encoding="ascii") as lines:
        return next(int(number) for name, number, *_ in map(str.split, lines) if name == key)


def _container_limit() -> int | None:
    limit = _CGROUP / "memory.max"
    if not limit.is_file() or (text := limit.read_text(encoding="ascii").strip()) == "max":
        return None
    return int(text)
