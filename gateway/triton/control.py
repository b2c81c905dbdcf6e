"""Triton's control calls: liveness, repository, metadata, loading and unloading.

Knows nothing of generations. Every method raises `TritonError`, with any fault.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.triton.channel import Channel
from gateway.triton.status import MESSAGE_LIMIT

_LOAD_FAILURE = re.compile(r"is at UNAVAILABLE state: (?:Internal: )?(.*)", re.DOTALL)
_TRACEBACK = re.compile(r"\s+At:\n.*", re.DOTALL)
_DEAD_STUB = "is not healthy"
_UNLOADED = "unloaded"
"""The reason that Triton gives for an entry that is unavailable because it was unloaded."""


class EntryState(enum.IntEnum):
    """The state of a repository entry; with several versions, the smallest of their states."""

    LOADING = 0
    READY = 1
    UNLOADING = 2
    """Its running requests are still being answered."""
    FAILED = 3
    """It could not be loaded."""
    UNLOADED = 4
    """It was unloaded on purpose."""
    NEVER_LOADED = 5

    @property
    def in_memory(self) -> bool:
        """Whether any of it is in memory."""
        return self <= EntryState.UNLOADING


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """One of a model's tensors; -1 in `shape` stands for any size, including that of the batch."""

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
        channel: to that Triton; not closed here.
        timeout_s: for each call.
    """

    def __init__(self, channel: Channel, *, timeout_s: float = 5.0) -> None:
        self._channel = channel
        self._timeout_s = timeout_s

    async def live(self) -> bool:
        """Ask whether the server is up (its models need not be)."""
        return bool((await self._call("ServerLive", service_pb2.ServerLiveRequest())).live)

    async def repository(self) -> dict[str, EntryState]:
        """Return the entries that are on the repository's disk, loaded or not, by name."""
        index = await self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        states: dict[str, EntryState] = {}
        for version in index.models:
            state = _entry_state(version.state, version.reason)
            states[version.name] = min(state, states.get(version.name, state))
        return states

    async def load(self, entry: str, *, timeout_s: float) -> None:
        """Load `entry` and wait until it is ready, including warm-up; a loaded entry stays as it is."""
        request = service_pb2.RepositoryModelLoadRequest(model_name=entry)
        await self._channel.unary("RepositoryModelLoad", request, timeout_s=timeout_s)

    async def unload(self, entry: str) -> None:
        """Begin to unload `entry`: it takes no new requests, and goes when the last one is answered."""
        await self._call("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name=entry))

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


def _entry_state(state: str, reason: str) -> EntryState:
    if state == "UNAVAILABLE":
        return EntryState.UNLOADED if reason in ("", _UNLOADED) else EntryState.FAILED
    return EntryState[state] if state else EntryState.NEVER_LOADED


def load_failure(detail: str) -> str:
    """Return why Triton could not load an entry, as one line without traceback; it may contain a path."""
    found = _LOAD_FAILURE.search(detail)
    reason = _TRACEBACK.sub("", found[1] if found else detail)
    if _DEAD_STUB in reason:
        return "its process died while loading; is there enough memory?"
    return " ".join(reason.split()).rstrip(";")[:MESSAGE_LIMIT]


def _tensors(messages: Iterable[Any]) -> dict[str, TensorMetadata]:
    return {
        tensor.name: TensorMetadata(datatype=tensor.datatype, shape=tuple(tensor.shape))
        for tensor in messages
    }
