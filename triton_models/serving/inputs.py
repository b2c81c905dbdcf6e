"""What a request to a stream entry holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inputs:
    """The three tensors of one request, as bytes."""

    prompt: bytes
    history: bytes
    sampling: bytes
