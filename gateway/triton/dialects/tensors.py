"""Writes the input tensors of a request and reads the output tensors of a response, whatever their names."""

import secrets
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from gateway.core.request import Generation
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects.base import Request, Response
from wire.sampling import Sampling
from wire.strings import pack_strings, unpack_strings

_FORMS: Final = {
    "BOOL": "?",
    "INT32": "i",
    "INT64": "q",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
"""Of the numbers in raw tensors, little-endian: `struct`'s letters by KServe's datatypes."""

DEFAULTS: Final = {name: getattr(Sampling(), name) for name in Sampling.__struct_fields__}
"""Of the parameters of an answer, by their names in `Sampling`."""


class Tensors:
    """Writes those inputs of a request that the model has; `batched`: with a first dimension of 1."""

    def __init__(self, request: Request, inputs: Collection[str], *, batched: bool = False) -> None:
        self._request = request
        self._inputs = inputs
        self._batched = batched

    def text(self, name: str, *values: str) -> bool:
        """Write strings; return whether the model has the input."""
        return self._put(name, "BYTES", len(values), pack_strings([value.encode() for value in values]))

    def numbers(self, name: str, datatype: str, *values: float, param: str | None = None) -> bool:
        """Write numbers or truth values of KServe's `datatype`; return whether the model has the input.

        Raises:
            InvalidRequestError: one is outside the datatype's range; names `param`.
        """
        return self._put(name, datatype, len(values), _packed(datatype, values, param))

    def flags(self, *names: str) -> bool:
        """Write true to each of these inputs; return whether the model has them all."""
        has = [self._put(name, "BOOL", 1, b"\x01") for name in names]
        return all(has)

    def words(self, name: str, words: Sequence[Sequence[int]], *, param: str) -> bool:
        """Write words, at least one, as TensorRT-LLM reads them: their ids in a row, above each word's end.

        Return whether the model has the input.

        Raises:
            InvalidRequestError: an id is out of range; names `param`.
        """
        ids = [id_ for word in words for id_ in word]
        ends = [*accumulate(map(len, words)), *[-1] * (len(ids) - len(words))]
        return self._put(name, "INT32", len(ids), _packed("INT32", [*ids, *ends], param), rows=(2,))

    def parameters(
        self,
        generation: Generation,
        datatypes: Mapping[str, str],
        names: Callable[[str], Sequence[str]],
        *,
        seeded: bool = False,
    ) -> None:
        """Write the parameters that are numbers, each with an input of its own.

        `datatypes` are by the parameters' names in `Sampling`; `names` returns those that its input may have.
        `seeded`: a request without a seed gets one, where the backend's own is the same for all.

        Raises:
            InvalidRequestError: the model has none for a parameter that changes the answer.
        """
        for name, datatype in datatypes.items():
            value = getattr(generation, name)
            changes = value != DEFAULTS[name]
            if value is None and name == "seed" and seeded:
                value = secrets.randbits(63)
            if value is None or (name == "top_k" and not value):
                continue
            if datatype == "UINT64":
                value %= 2**64  # ours are signed
            if not any(self.numbers(each, datatype, value, param=name) for each in names(name)) and changes:
                raise InvalidRequestError(f"The model's backend does not have {name!r}.", param=name)

    def _put(self, name: str, datatype: str, count: int, raw: bytes, *, rows: tuple[int, ...] = ()) -> bool:
        if name not in self._inputs:
            return False
        shape = [1, *rows, count] if self._batched else [*rows, count]
        self._request.inputs.add(name=name, datatype=datatype, shape=shape)
        self._request.raw_input_contents.append(raw)
        return True


def _packed(datatype: str, values: Sequence[float], param: str | None) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{_FORMS[datatype]}", *values)
    except struct.error:
        raise InvalidRequestError(
            f"The model's backend takes this as {datatype}: it is out of range.", param=param
        ) from None


def outputs(response: Response) -> dict[str, list[Any]]:
    """Return the outputs of a response by name, strings as text; a tensor without dimensions has one value.

    Raises:
        UpstreamProtocolError: a tensor is not of its datatype.
    """
    found: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        try:
            if tensor.datatype == "BYTES":
                found[tensor.name] = [each.decode(errors="replace") for each in unpack_strings(raw)]
            elif (form := _FORMS.get(tensor.datatype)) is not None:
                found[tensor.name] = [value for (value,) in struct.iter_unpack("<" + form, raw)]
        except (ValueError, struct.error) as error:
            raise UpstreamProtocolError(
                f"The model's answer cannot be read: output {tensor.name}."
            ) from error
    return found
