"""Finds the weight files of a checkpoint directory, and reads their tensors one by one.

Knows nothing of any model, only names, shapes and bytes. The file layouts are those that transformers writes:
one `model.safetensors`, or shards with `model.safetensors.index.json`; the same for `pytorch_model.bin`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from triton_models.directory import read_json
from triton_models.errors import CheckpointError

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX_SUFFIX = ".index.json"


class Shard(Protocol):
    """One open weight file."""

    def names(self) -> set[str]:
        """Return the names of its tensors."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; it is backed by the mapped file: valid while the shard is open."""
        ...


def find_shards(directory: Path) -> dict[Path, set[str] | None]:
    """Return the weight files, each with the tensor names that the index lists for it; None without an index.

    Safetensors are preferred to `.bin` files.

    Raises:
        CheckpointError: there are no weights, the index is broken, or a file that it names is missing.
    """
    for name in _SINGLE_FILES:
        if (directory / name).is_file():
            return {directory / name: None}
        index = directory / (name + _INDEX_SUFFIX)
        if index.is_file():
            return _read_index(index)
    raise CheckpointError(
        f"{directory}: no weights: neither {' nor '.join(_SINGLE_FILES)}, nor one's {_INDEX_SUFFIX}"
    )


@contextmanager
def open_shard(path: Path) -> Iterator[Shard]:
    """Open a weight file. It is memory-mapped: a tensor is read from disk only when it is used.

    Raises:
        CheckpointError: the file is truncated, or not of the type that its name indicates.
    """
    if path.suffix == ".safetensors":
        with ExitStack() as stack:
            with _faults_named(path):
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            yield _SafetensorsShard(path, file)
    else:
        # weights_only: a pickle with anything but tensors and plain containers is refused.
        with _faults_named(path):
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        yield _PickleShard(path, tensors)


def _read_index(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    shards: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        # A shard lies beside its index; another path could make a checkpoint read any file of the machine.
        if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to be in {name!r}, which is no plain file name"
            )
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {index.name} says that it holds tensor {tensor!r}")
        names = shards.setdefault(path, set())
        if names is not None:
            names.add(tensor)
    return shards


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """Turn any exception that the readers raise for a broken file into an error that names the file."""
    try:
        yield
    except Exception as error:
        # The readers are other libraries' code: damaged bytes can make them raise exceptions of any type.
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: truncated or not a weight file: {detail[0]}") from error


class _SafetensorsShard:
    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file

    def names(self) -> set[str]:
        return set(self._file.keys())

    def read(self, name: str) -> Tensor:
        with _faults_named(self._path):
            tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _PickleShard:
    def __init__(self, path: Path, tensors: object) -> None:
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{path}: holds a {type(tensors).__name__} instead of named tensors")
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__} instead of a tensor")
        self._tensors: dict[str, Tensor] = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]
