"""A request in Triton's own words: named tensors in, named tensors out, for the entry `M` of a served model.

Older clients speak so (`POST /MutilBackendService/Predict`). The gateway passes their tensors on without
knowing what they mean: no events, no prompts, no protobuf.
"""

from dataclasses import dataclass
from typing import Literal

from gateway.tracing import Headers

Datatype = Literal["BYTES", "INT16"]
"""What the inputs of an entry `M` can be, by any of its contracts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTensor:
    """One input; `values` are the elements in row-major order, as many as `shape` says."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    values: tuple[bytes, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One output; `raw` as Triton serialises it: strings each behind its 4-byte little-endian length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A request whose tensors are whole in themselves; whether they suit the model, the upstream says."""

    request_id: str
    model: str
    inputs: tuple[InputTensor, ...]
    outputs: tuple[str, ...] = ()
    """Names of the outputs asked for; empty asks for all."""
    version: str = ""
    """Of the model; empty leaves the choice to Triton."""
    deadline: float
    """Of the event loop's clock, in seconds."""
    headers: Headers = ()
    """Of the call upstream, beside the request's id: its place in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionAnswer:
    """What the model answered, and which version of it did."""

    version: str
    outputs: tuple[OutputTensor, ...]
