"""Copies all small tensors of a step to the device in one transfer."""

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without waiting for its current work."""
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers


class Staging:
    """Collects named lists of 64-bit numbers on the host, then uploads them as views of one tensor."""

    def __init__(self) -> None:
        self._words = array("q")
        self._parts: list[tuple[str, int, torch.dtype]] = []

    def integers(self, name: str, values: Iterable[int]) -> None:
        """Add a list that becomes an int64 tensor."""
        self._add(name, array("q", values), torch.int64)

    def floats(self, name: str, values: Iterable[float]) -> None:
        """Add a list that becomes a float64 tensor."""
        self._add(name, array("d", values), torch.float64)

    def upload(self, device: torch.device) -> dict[str, Tensor]:
        """Return every list by name, as one-dimensional tensors on `device`."""
        if not self._words:
            return {name: torch.empty(0, dtype=dtype, device=device) for name, _, dtype in self._parts}
        words = upload(torch.frombuffer(self._words, dtype=torch.int64), device)
        parts = torch.split(words, [length for _, length, _ in self._parts])
        return {name: part.view(dtype) for part, (name, _, dtype) in zip(parts, self._parts, strict=True)}

    def _add(self, name: str, values: "array[int] | array[float]", dtype: torch.dtype) -> None:
        self._words.frombytes(values.tobytes())
        self._parts.append((name, len(values), dtype))
