"""Triton's own questions and answers: is it alive, what has it, what does a model take.

Knows nothing of generations. Every method raises `TritonError`, with any fault.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.triton.channel import Channel

READY = "READY"
"""The state of a repository entry that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryEntry:
    """A model of the repository."""

    name: str
    state: str
    """READY, LOADING, UNLOADING, UNAVAILABLE, or empty if it was never loaded."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """What a model says of one of its tensors; -1 in `shape` is any size, the batch's among them."""

    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """A model's tensors by name."""

    inputs: Mapping[str, TensorMetadata]
    outputs: Mapping[str, TensorMetadata]


class Control:
    """Control calls on one Triton.

    Args:
        channel: to that Triton; whoever made it closes it.
        timeout_s: for each call.
    """

    def __init__(self, channel: Channel, *, timeout_s: float = 5.0) -> None:
        self._channel = channel
        self._timeout_s = timeout_s

    async def live(self) -> bool:
        """Ask whether the server is up (its models need not be)."""
        return bool((await self._call("ServerLive", service_pb2.ServerLiveRequest())).live)

    async def model_ready(self, entry: str) -> bool:
        """Ask whether `entry` is loaded. A model whose process died stays "ready": only a probe tells."""
        return bool((await self._call("ModelReady", service_pb2.ModelReadyRequest(name=entry))).ready)

    async def repository(self) -> list[RepositoryEntry]:
        """List the entries that were ever loaded (or found, where Triton polls its repository)."""
        index = await self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        return [
            RepositoryEntry(name=model.name, state=model.state, reason=model.reason) for model in index.models
        ]

    async def metadata(self, entry: str) -> ModelMetadata:
        """Return the tensors of `entry`, which must be loaded."""
        answer = await self._call("ModelMetadata", service_pb2.ModelMetadataRequest(name=entry))
        return ModelMetadata(
            inputs=_tensors(answer.inputs),
            outputs=_tensors(answer.outputs),
        )

    async def config(self, entry: str) -> Any:
        """Return the `inference.ModelConfig` message of `entry`, which must be loaded."""
        return (await self._call("ModelConfig", service_pb2.ModelConfigRequest(name=entry))).config

    async def _call(self, method: str, request: Any) -> Any:
        return await self._channel.unary(method, request, timeout_s=self._timeout_s)


def _tensors(messages: Iterable[Any]) -> dict[str, TensorMetadata]:
    return {
        tensor.name: TensorMetadata(datatype=tensor.datatype, shape=tuple(tensor.shape))
        for tensor in messages
    }
