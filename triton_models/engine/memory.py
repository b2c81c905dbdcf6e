"""How much memory a device has: a GPU's own memory; for a CPU, that of the machine or container."""

from pathlib import Path
from typing import Final

import torch

GIB: Final = 2**30

_CGROUP = Path("/sys/fs/cgroup")
"""This process's cgroup as seen in a container (cgroup v2)."""


def free_bytes(device: torch.device) -> int:
    """Return how many bytes this process can still allocate on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = _meminfo("MemAvailable")
    limit = _container_limit()
    if limit is None:
        return machine
    return min(machine, max(0, limit - int((_CGROUP / "memory.current").read_text(encoding="ascii"))))


def total_bytes(device: torch.device) -> int:
    """Return the total bytes of `device`, swap space included, whether in use or free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = _meminfo("MemTotal") + _meminfo("SwapTotal")
    return min(machine, _container_limit() or machine)


def _meminfo(key: str) -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _container_limit() -> int | None:
    limit = _CGROUP / "memory.max"
    if not limit.is_file() or (text := limit.read_text(encoding="ascii").strip()) == "max":
        return None
    return int(text)
