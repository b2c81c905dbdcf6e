"""The byte layout of string tensors.

Triton serialises a BYTES tensor as, for each element in row-major order, a 4-byte little-endian length and
that many bytes (https://docs.nvidia.com/deeplearning/triton-inference-server, "binary tensor data").
"""

import struct
from collections.abc import Iterable, Iterator

_LENGTH = struct.Struct("<I")


def pack_strings(values: Iterable[bytes]) -> bytes:
    """Serialise `values` as the raw contents of one BYTES tensor."""
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)


def unpack_strings(raw: bytes) -> list[bytes]:
    """Read the elements of a BYTES tensor back from its raw contents.

    Raises:
        ValueError: a length points beyond the end of `raw`.
    """
    return list(each_string(raw))


def each_string(raw: bytes) -> Iterator[bytes]:
    """Yield the elements of a BYTES tensor one by one from its raw contents.

    Raises:
        ValueError: a length points beyond the end of `raw`; the elements before it have been yielded.
    """
    position = 0
    while position < len(raw):
        start = position + _LENGTH.size
        if start > len(raw):
            raise ValueError("a string tensor ends inside a length")
        end = start + _LENGTH.unpack_from(raw, position)[0]
        if end > len(raw):
            raise ValueError("a string tensor ends inside an element")
        yield raw[start:end]
        position = end
