"""Reads a checkpoint directory, as published, into our own model class.

`triton_models.families` knows what is in `config.json`, and how tensors are called. No remote code runs, and
only tensors are unpickled. The layouts of weight files are those that transformers writes: one
`model.safetensors`, or shards with `model.safetensors.index.json`; the same for `pytorch_model.bin`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from triton_models.directory import find_shards, read_json
from triton_models.engine.capacity import GIB, total_bytes
from triton_models.engine.linear import Linear
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.errors import CheckpointError, faults_name_the_file
from triton_models.families import Place, read_shape, tensor_names
from triton_models.weight_formats import PackedMatrices, WeightFormat, agreed_quantization, read_format

LoadProgress = Callable[[int, int], None]
"""Called with two byte counts of the model's weights: those filled so far, and the total."""

_BROKEN = "truncated or not a weight file"

_NARROW = {torch.float16, torch.bfloat16}
_DTYPES = {torch.float32, *_NARROW}


Shard = tuple[set[str], Callable[[str], Tensor]]
"""Of an open weight file: the names of its tensors, and what returns one, on the CPU. A tensor is backed by
the mapped file: valid while that is open."""


@torch.no_grad()  # a `.bin` file may hold parameters, of which copies would be recorded
def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
    *,
    quantization: str | None = None,
    chat_format: str | None = None,
    as_stored: bool = False,
) -> Decoder:
    """Read a checkpoint into a model on `device`.

    Files are memory-mapped one at a time and copied tensor by tensor into the model, so that at most about
    one shard is in host memory in addition to the model. With a `quantization` (see `QUANTISATIONS`), all
    matrices but the embedding are quantised as they are copied. A checkpoint that is quantised already stays
    as it is; its output head, too, if it is not quantised. `chat_format`: as for `read_shape`. `as_stored`:
    matrices that all are in one dtype of 16 bits stay in it, though `dtype` is float32: see `Decoder`.

    Raises:
        CheckpointError: the checkpoint is broken (the message names the file, and the tensor if one is at
            fault), or the model does not fit on the device.
    """
    config = read_shape(directory, chat_format)
    stored, quantization = read_quantization(directory, quantization)
    shards = find_shards(directory)
    form, head = _matrix_forms(stored, quantization)
    narrow = _narrow_dtype(shards) if as_stored and stored is None and quantization is None else None
    if (needed := config.nbytes(narrow or dtype, form, head)) > (there := total_bytes(device)):
        raise CheckpointError(
            f"{directory / 'config.json'}: a model of this shape takes {needed / GIB:,.1f} GiB in"
            f" {quantization or narrow or dtype}, and {device} has {there / GIB:,.1f}; "
            + _what_would_fit(config, dtype, there, stored)
        )
    model = Decoder(config, dtype=dtype, device=device, form=form, head=head, stored=narrow)
    names = tensor_names(model, read_json(directory / "config.json")["model_type"])
    missing = names.places
    total = sum(tensor.nbytes for tensor in missing.values())
    packed = None if stored is None else PackedMatrices(stored, model.embedding, missing)
    filled = 0
    for path, expected in shards.items():
        with open_shard(path) as (held, read):
            _check_names(path, held, expected)
            for name in sorted(held):
                place = name.removeprefix(names.prefix)
                if place in names.skipped:
                    continue
                if packed is not None and place not in missing and packed.has(place):
                    filled += packed.add(path, place, read(name))
                else:
                    filled += _fill(path, name, read, place, missing)
                if progress is not None:
                    progress(filled, total)
            if packed is not None:
                packed.keep()
    absent = [*missing, *(packed.absent() if packed is not None else ())]
    if absent:
        where = next(iter(shards)) if len(shards) == 1 else directory
        raise CheckpointError(f"{where}: tensor {min(absent)!r} is missing ({len(absent)} in all)")
    return model


def read_quantization(directory: Path, wanted: str | None) -> tuple[WeightFormat | None, str | None]:
    """Return the format of a checkpoint that is quantised already, and how its matrices are held.

    That is a name in `QUANTISATIONS`, or None; so is `wanted`, the option's value.

    Raises:
        UnsupportedArchitectureError: a format that cannot be read.
        CheckpointError: `config.json` is broken, or `wanted` is something else.
    """
    path = directory / "config.json"
    stored = read_format(path, read_json(path))
    return stored, agreed_quantization(path, stored, wanted)


def _narrow_dtype(shards: Iterable[Path]) -> torch.dtype | None:
    """Return the dtype that all matrices and biases have, if it is one of 16 bits."""
    found: set[torch.dtype] = set()
    for path in shards:
        with open_shard(path) as (names, read):
            tensors = ((name, read(name)) for name in names)
            found.update(each.dtype for name, each in tensors if each.dim() > 1 or name.endswith(".bias"))
    return found.pop() if len(found) == 1 and found < _NARROW else None


def _matrix_forms(stored: WeightFormat | None, quantization: str | None) -> tuple[type[Linear], type[Linear]]:
    """Return the forms of a model's matrices, and of its output head."""
    form: type[Linear] = Linear if quantization is None else QUANTISATIONS[quantization]
    return form, Linear if stored is not None and not stored.head else form


def _what_would_fit(
    config: DecoderConfig, dtype: torch.dtype, there: int, stored: WeightFormat | None
) -> str:
    if stored is not None and stored.quantization is not None:
        return f"its weights are {stored.quantization} already"
    sizes = {name: config.nbytes(dtype, form) for name, form in QUANTISATIONS.items()}
    for name, size in sizes.items():
        if size <= there:
            return f"with quantization {name} it takes {size / GIB:,.1f}"
    name, size = min(sizes.items(), key=lambda item: item[1])
    return f"no quantization would fit: {name} takes {size / GIB:,.1f}"


@contextmanager
def progress_bar(name: str) -> Iterator[LoadProgress]:
    """Show on stderr how far the loading of `name` is; yields the callback for `load_model`'s `progress`."""
    with tqdm(desc=f"loading {name}", unit="B", unit_scale=True) as bar:

        def advance(filled: int, total: int) -> None:
            bar.total = total
            bar.update(filled - bar.n)

        yield advance


@contextmanager
def open_shard(path: Path) -> Iterator[Shard]:
    """Open a weight file. It is memory-mapped, unless it is older: a tensor is read when it is used.

    Raises:
        CheckpointError: the file is truncated, or not of the type that its name indicates.
    """
    if path.suffix == ".safetensors":
        with ExitStack() as stack:
            with faults_name_the_file(path, _BROKEN):
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            yield set(file.keys()), faults_name_the_file(path, _BROKEN)(file.get_tensor)
    else:
        # weights_only: a pickle with anything but tensors and plain containers is refused.
        with faults_name_the_file(path, _BROKEN):
            # Files of torch before 1.6 are no zip archives, and cannot be mapped.
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{path}: holds a {type(tensors).__name__} instead of named tensors")
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__} instead of a tensor")
        yield set(tensors), tensors.__getitem__


def _check_names(path: Path, names: set[str], expected: set[str] | None) -> None:
    """Check that a shard holds exactly the tensors that the index, if there is one, lists for it."""
    if expected is None:
        return
    if absent := expected - names:
        raise CheckpointError(f"{path}: tensor {min(absent)!r} is not in it, and the index says that it is")
    if unlisted := names - expected:
        raise CheckpointError(f"{path}: tensor {min(unlisted)!r} is in it, and the index does not say so")


def _fill(path: Path, name: str, read: Callable[[str], Tensor], place: str, missing: dict[str, Place]) -> int:
    """Copy a tensor to its `place` and remove that from `missing`; return the number of bytes copied."""
    if place not in missing:
        raise CheckpointError(f"{path}: tensor {name!r} has no place in this model, or came twice")
    source = read(name)
    destination = missing.pop(place)
    if tuple(source.shape) != tuple(destination.shape):
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(source.shape)} instead of {list(destination.shape)}"
        )
    if source.dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} is {source.dtype}, not a 16 or 32 bit float")
    try:
        destination.copy_(source)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name!r} {error}") from error
    return destination.nbytes
