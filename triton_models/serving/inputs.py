"""The inputs of a request to a stream entry."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inputs:
    """The three tensors of one request, as bytes."""

    prompt: bytes
    history: bytes
    sampling: bytes
