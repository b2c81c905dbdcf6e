"""A request in Triton's terms: named tensors in, named tensors out, for the entry `M` of a served model.

Older clients send these (`POST /MutilBackendService/Predict`). The gateway passes the tensors on without
knowing what they mean: no events, no prompts, no protobuf.
"""

from dataclasses import dataclass
from typing import Literal

from gateway.tracing import Headers

Datatype = Literal["BYTES", "INT16"]
"""The datatypes of an entry `M`'s inputs, over all contracts."""


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
    """A request whose tensors are consistent; whether they suit the model is for the upstream to say."""

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
    """Further headers of the call upstream: the trace context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionAnswer:
    """The model's answer, and the version that gave it."""

    version: str
    outputs: tuple[OutputTensor, ...]
