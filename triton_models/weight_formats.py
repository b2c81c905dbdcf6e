"""Checkpoints that are quantised already: which format `config.json` says, and what its tensors mean.

Read directly: GPTQ and AWQ with 4 bits, compressed-tensors' `pack-quantized` (4 bits), `int-quantized` and
`float-quantized`, `quant_method: fp8` (whole tensors, rows or blocks), ChatGLM's own `quantization_bit` 4
and 8. Weights of 4 and 8 bits keep their numbers; the engine's 4-bit matrices have a scale and a zero for
each `GROUP` weights of a row, so only groups of a multiple of that, or whole rows, can be read. fp8 weights
are expanded. Only weights are read: activations stay in the model's dtype, whatever the configuration says.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from triton_models.engine.quantised import GROUP, StoredWeights
from triton_models.errors import CheckpointError, UnsupportedArchitectureError
from triton_models.families import Place

log = logging.getLogger(__name__)

HEADS: Final = ("lm_head", "transformer.output_layer")
"""Names of output heads, which most tools leave as they are."""

_WOULD_WORK = (
    "GPTQ or AWQ with 4 bits, compressed-tensors with 4 or 8 bits, fp8, or the 16-bit checkpoint with"
    " --quantization int8 or int4"
)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of an AWQ word hold the first, second, ... of its eight columns."""
_GPTQ_ONES = 0x11111111
"""GPTQ's first layout has every zero point less 1, subtracted from whole words."""

Parts = Mapping[str, Tensor]
"""The tensors of one matrix, by the last parts of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a checkpoint has its quantised matrices."""

    name: str
    """In words, for messages."""
    quantization: str | None
    """As the option `quantization`; None: matrices are expanded while loading."""
    parts: tuple[str, ...]
    """Ends of the names of the tensors that each quantised matrix has."""
    unpack: Callable[[Parts], StoredWeights | Tensor]
    """Returns a matrix's weights; an expanded one as float32, [N, K].

    Raises ValueError for tensors that do not mean what the configuration says.
    """
    checks: Mapping[str, Callable[[Tensor], None]] = field(default_factory=dict)
    """Tensors that some files also have, and what raises ValueError if one says what cannot be read."""
    skipped: tuple[str, ...] = ()
    """Tensors that are not needed: shapes, and scales of activations."""
    head: bool = False
    """Whether the output head is quantised, too."""


def read_format(path: Path, raw: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format that the contents of the `config.json` at `path` say; None: not quantised.

    Raises:
        UnsupportedArchitectureError: a format that cannot be read; the message says what would work.
        CheckpointError: a value is invalid.
    """
    found = raw.get("quantization_config")
    if not found:
        bits = raw.get("quantization_bit")
        if not bits:
            return None
        if bits not in (4, 8):
            raise _refused(path, f"quantization_bit {bits!r}")
        return _chatglm(bits)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: quantization_config is no object")
    method = found.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}
    if method not in readers:
        raise _refused(path, f"quantization_config.quant_method {method!r}")
    for key in ("transform_config", "rotation"):
        if found.get(key) and not _in_weights(found[key]):
            raise _refused(path, f"quantization_config: {key}, which rotates activations,")
    return readers[method](path, found)


def agreed_quantization(path: Path, stored: WeightFormat | None, wanted: str | None) -> str | None:
    """Return how matrices are quantised: as the checkpoint's are, else as `wanted`.

    Raises:
        CheckpointError: the checkpoint's are quantised in another way than `wanted`.
    """
    if stored is None or stored.quantization is None:
        return wanted
    if wanted not in (None, stored.quantization):
        raise CheckpointError(
            f"{path}: the weights are {stored.quantization} already ({stored.name}); leave out quantization,"
            f" or set it to {stored.quantization}, not {wanted}"
        )
    return stored.quantization


class PackedMatrices:
    """The quantised matrices of a checkpoint; each has several tensors, perhaps in several shards."""

    def __init__(self, stored: WeightFormat, embedding: Tensor, missing: dict[str, Place]) -> None:
        """Take the places of these matrices, of which `embedding` is none, out of `missing`."""
        self._format = stored
        self._places: dict[str, Place] = {}
        for name, place in tuple(missing.items()):
            stem = name.removesuffix(".weight")
            matrix = len(place.shape) > 1 and place is not embedding
            if matrix and (stored.head or stem not in HEADS):
                self._places[stem] = missing.pop(name)
        self._stems = frozenset(self._places)
        self._parts: dict[str, dict[str, Tensor]] = {}
        if stored.quantization is None:
            log.info("weights in %s are expanded while loading", stored.name)

    def has(self, name: str) -> bool:
        """Return whether the tensor belongs to one of these matrices."""
        stem, _, suffix = name.rpartition(".")
        known = (*self._format.parts, *self._format.checks, *self._format.skipped)
        return stem in self._stems and suffix in known

    def add(self, path: Path, name: str, tensor: Tensor) -> int:
        """Take a tensor, and fill its matrix if it is the last; return the bytes of what was filled.

        Raises:
            CheckpointError: the tensors do not mean a matrix of this shape.
        """
        stem, _, suffix = name.rpartition(".")
        try:
            if suffix in self._format.checks:
                self._format.checks[suffix](tensor)
            elif suffix in self._format.parts:
                return self._take(stem, suffix, tensor)
        except (ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{path}: matrix {stem!r} ({self._format.name}) {error}") from error
        return 0

    def keep(self) -> None:
        """Copy what waits for its other parts, since its shard is about to be closed."""
        for parts in self._parts.values():
            parts.update({suffix: part.clone() for suffix, part in parts.items()})

    def absent(self) -> list[str]:
        """Return the names of the tensors that have not come."""
        return [
            f"{stem}.{suffix}"
            for stem in self._places
            for suffix in self._format.parts
            if suffix not in self._parts.get(stem, {})
        ]

    def _take(self, stem: str, suffix: str, tensor: Tensor) -> int:
        if stem not in self._places:
            raise ValueError(f"has {suffix} twice")
        parts = self._parts.setdefault(stem, {})
        parts[suffix] = tensor
        # Among fp8 weights, some are left in 16 bits.
        plain = self._format.quantization is None and suffix == "weight" and tensor.itemsize > 1
        if not plain and any(each not in parts for each in self._format.parts):
            return 0
        place = self._places.pop(stem)
        weights = tensor if plain else self._format.unpack(self._parts.pop(stem))
        if plain:
            del self._parts[stem]
        shape = list((weights if isinstance(weights, Tensor) else weights.numbers).shape)
        if shape != list(place.shape):
            raise ValueError(f"has shape {shape} instead of {list(place.shape)}")
        if isinstance(weights, Tensor):
            place.copy_(weights)
        elif not isinstance(place, Tensor):
            place.store(weights)
        return place.nbytes


def _refused(path: Path, what: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(f"{path}: {what} is not supported; what would work: {_WOULD_WORK}")


def _require(path: Path, found: Mapping[str, Any], key: str, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not among `allowed`; the first is the default."""
    value = found.get(key, allowed[0])
    if value not in allowed:
        raise _refused(path, f"quantization_config: {key} {value!r}")


def _group(path: Path, size: object) -> int | None:
    """Return a group size; None: whole rows."""
    if size in (-1, None):
        return None
    if not isinstance(size, int) or size < 1 or size % GROUP:
        raise _refused(path, f"quantization_config: group_size {size!r}, which is no multiple of {GROUP},")
    return size


def _left_out(path: Path, names: object) -> None:
    """Check that no matrix but the head is left in 16 bits."""
    for name in names if isinstance(names, list) else []:
        if str(name).removeprefix("re:.*") not in HEADS:
            raise _refused(path, f"quantization_config: leaving {name!r} as it is")


def _in_weights(transforms: Any) -> bool:
    """Return whether all of a `transform_config` was applied to the weights before they were stored."""
    try:
        applied = [each for group in transforms["config_groups"].values() for each in group["apply"]]
        return all(each["location"] in ("weight_input", "weight_output") for each in applied)
    except (AttributeError, KeyError, TypeError):
        return False


def _gptq(path: Path, found: Mapping[str, Any]) -> WeightFormat:
    """As AutoGPTQ and GPTQModel write it: words of eight weights along K, zero points along N."""
    _require(path, found, "bits", (4,))
    _require(path, found, "desc_act", (False,))
    _require(path, found, "checkpoint_format", ("gptq", "gptq_v2"))
    if found.get("dynamic"):
        raise _refused(path, "quantization_config: dynamic")
    _left_out(path, found.get("modules_to_not_convert"))
    group = _group(path, found.get("group_size", GROUP))
    ones = 0 if found.get("checkpoint_format") == "gptq_v2" else _GPTQ_ONES

    def unpack(parts: Parts) -> StoredWeights:
        numbers = _nibbles(parts["qweight"].T)
        return _with_zeros(numbers, parts["scales"].T, _nibbles(parts["qzeros"] + ones).T, group)

    return WeightFormat(
        name="GPTQ",
        quantization="int4",
        parts=("qweight", "qzeros", "scales"),
        unpack=unpack,
        checks={"g_idx": _in_order(group), "bias": _is_zero},
        head=found.get("lm_head") is True,
    )


def _awq(path: Path, found: Mapping[str, Any]) -> WeightFormat:
    """AutoAWQ's gemm layout: words of eight columns in an order of their own, zero points too."""
    bits = "bits" if "bits" in found else "w_bit"
    _require(path, found, bits, (4,))
    _require(path, found, "version", ("gemm", "GEMM"))
    _require(path, found, "zero_point", (True,))
    _left_out(path, found.get("modules_to_not_convert"))
    group = _group(path, found.get("group_size", found.get("q_group_size", GROUP)))

    def unpack(parts: Parts) -> StoredWeights:
        numbers, zeros = (_nibbles(parts[name], _AWQ_ORDER).T for name in ("qweight", "qzeros"))
        return _with_zeros(numbers, parts["scales"].T, zeros, group)

    return WeightFormat(name="AWQ", quantization="int4", parts=("qweight", "qzeros", "scales"), unpack=unpack)


def _compressed(path: Path, found: Mapping[str, Any]) -> WeightFormat:
    """compressed-tensors: one group of settings for all matrices."""
    groups = found.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else {}
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        raise _refused(path, "quantization_config: anything but one group, whose targets are ['Linear'],")
    for key in ("kv_cache_scheme", "sparsity_config"):
        if found.get(key):
            raise _refused(path, f"quantization_config: {key}")
    ignored = found.get("ignore") or []
    layout, strategy = found.get("format"), weights.get("strategy")
    head = not any(str(name).removeprefix("re:.*") in HEADS for name in ignored)
    what = f"{layout!r} with {weights.get('num_bits')!r} bits, {weights.get('type')!r}, by {strategy!r},"
    if weights.get("actorder") in (True, "group"):
        raise _refused(path, "quantization_config: actorder 'group'")
    match layout, weights.get("num_bits"), weights.get("type"), strategy:
        case "pack-quantized", 4, "int", "group" | "channel":
            _left_out(path, ignored)
            return _packed(path, weights, head=head)
        case "int-quantized", 8, "int", "channel" if weights.get("symmetric") is True:
            _left_out(path, ignored)
            return WeightFormat(
                name="compressed-tensors int-quantized",
                quantization="int8",
                parts=("weight", "weight_scale"),
                unpack=_unpack_int8,
                skipped=("input_scale", "input_zero_point"),
                head=head,
            )
        case "float-quantized", 8, "float", "channel" | "tensor":
            return _expanded("compressed-tensors float-quantized", "weight_scale", None)
    raise _refused(path, f"quantization_config: {what}")


def _packed(path: Path, weights: Mapping[str, Any], *, head: bool) -> WeightFormat:
    """compressed-tensors' words of eight weights along K; weights and zero points are 8 more than signed."""
    group = _group(path, weights.get("group_size") if weights["strategy"] == "group" else None)
    symmetric = weights.get("symmetric") is True

    def unpack(parts: Parts) -> StoredWeights:
        numbers, scales = _nibbles(parts["weight_packed"]), parts["weight_scale"]
        if symmetric:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        else:
            zeros = _nibbles(parts["weight_zero_point"].T).T[: len(numbers)]
        return _with_zeros(numbers, scales, zeros, group)

    return WeightFormat(
        name="compressed-tensors pack-quantized",
        quantization="int4",
        parts=("weight_packed", "weight_scale") + (() if symmetric else ("weight_zero_point",)),
        unpack=unpack,
        checks={"weight_g_idx": _in_order(group)},
        skipped=("weight_shape", *(("weight_zero_point",) if symmetric else ())),
        head=head,
    )


def _fp8(path: Path, found: Mapping[str, Any]) -> WeightFormat:
    _require(path, found, "fmt", ("e4m3", "float8_e4m3fn"))
    block = found.get("weight_block_size")
    if block is None:
        return _expanded("fp8", "weight_scale", None)
    match block:
        case [int() as rows, int() as columns] if rows > 0 and columns > 0:
            return _expanded("fp8", "weight_scale_inv", (rows, columns))
    raise CheckpointError(f"{path}: weight_block_size must be two sizes, not {block!r}")


def _expanded(name: str, scale: str, block: tuple[int, int] | None) -> WeightFormat:
    """E4M3 numbers with a scale for the matrix, [] or [1], for each row, [N, 1], or for each block."""

    def unpack(parts: Parts) -> Tensor:
        weight, scales = parts["weight"], parts[scale].float()
        if weight.dtype != torch.float8_e4m3fn:
            raise ValueError(f"is {weight.dtype}, not float8_e4m3fn")
        if block is not None:
            rows, columns = weight.shape
            scales = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        elif scales.numel() > 1:
            scales = scales.reshape(len(weight), 1)
        return weight.float() * scales

    return WeightFormat(
        name=name,
        quantization=None,
        parts=("weight", scale),
        unpack=unpack,
        skipped=("input_scale",),
        head=True,
    )


def _chatglm(bits: int) -> WeightFormat:
    """As the original's `quantization.py`: a scale for each row; of two 4-bit weights, the first is high.

    Weights of 4 bits are signed, in two's complement.
    """

    def unpack(parts: Parts) -> StoredWeights:
        pairs, scales = parts["weight"].view(torch.uint8), parts["weight_scale"][:, None]
        numbers = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1) ^ 8
        return _with_zeros(numbers, scales, torch.full(scales.shape, 8, dtype=torch.uint8), None)

    return WeightFormat(
        name=f"ChatGLM's quantization_bit {bits}",
        quantization=f"int{bits}",
        parts=("weight", "weight_scale"),
        unpack=_unpack_int8 if bits == torch.iinfo(torch.int8).bits else unpack,
    )


def _in_order(group: int | None) -> Callable[[Tensor], None]:
    """Return what checks that a tensor of each weight's group has the groups in order."""

    def check(indices: Tensor) -> None:
        if not torch.equal(indices.long(), torch.arange(len(indices)) // (group or len(indices))):
            raise ValueError("has weights in another order than that of their groups (desc_act, actorder)")

    return check


def _is_zero(bias: Tensor) -> None:
    """Check the bias of a matrix that has none in the model: AutoGPTQ gave all matrices one."""
    if bias.any():
        raise ValueError("has a bias, and the model has none")


def _unpack_int8(parts: Parts) -> StoredWeights:
    """Return int8 weights with a scale for each row."""
    weight, scales = parts["weight"], parts["weight_scale"].float()
    if weight.dtype != torch.int8:
        raise ValueError(f"is {weight.dtype}, not int8")
    return StoredWeights(weight, scales.reshape(len(weight), 1))


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return the eight numbers of each int32 word: [n, m] gives [n, 8 * m] uint8; lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"is {words.dtype}, not int32")
    pairs = words.contiguous().view(torch.uint8)  # little-endian, as safetensors are
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(words), -1, 8)
    return numbers[..., list(order)].flatten(1)


def _with_zeros(numbers: Tensor, scales: Tensor, zeros: Tensor, group: int | None) -> StoredWeights:
    """Return weights that are `(numbers - zeros) * scales`, with zeros and scales, [N, groups], for groups.

    The engine's zero is `(8 - zeros) * scales`: exact in float32, since scales have 11 bits at most.
    """
    rows, columns = numbers.shape
    expected = (rows, -(-columns // (group or columns)))
    for what, tensor in (("scales", scales), ("zero points", zeros)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"has {what} of shape {list(tensor.shape)} instead of {list(expected)}")
    groups = -(-columns // GROUP)
    repeats = groups if group is None else group // GROUP
    scales = scales.float()
    shifts = (8.0 - zeros) * scales
    return StoredWeights(
        numbers, *(each.repeat_interleave(repeats, 1)[:, :groups] for each in (scales, shifts))
    )
