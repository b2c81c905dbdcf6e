"""ModelInferRequest and ModelInferResponse as protobuf JSON, the body and answer of `Predict`.

The messages are those of the KServe inference protocol, version 2; the mapping to JSON is protobuf's
(https://protobuf.dev/programming-guides/json): fields by either of their names, 64-bit integers as strings,
bytes as base64. protobuf's own reader is not used: it takes any text for base64 and does not always name the
field at fault. Of the messages' fields, those that reach into the server (shared memory, raw contents,
parameters) are refused. Knows nothing of HTTP or of the channel to Triton.
"""

import base64
import binascii
import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gateway.errors import InvalidRequestError
from gateway.openai.document import read_object, validate, without_neutral
from gateway.prediction import InputTensor, Prediction, PredictionAnswer

_MAX_TENSORS = 32
_MAX_RANK = 8


def _decode_base64(value: Any) -> bytes:
    """Read base64 of either alphabet, with or without its padding, as protobuf's JSON may be written."""
    if not isinstance(value, str):
        raise ValueError("base64 text is needed")  # noqa: TRY004 - what pydantic turns into a field's fault
    try:
        standard = value.encode("ascii").translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
        return base64.b64decode(standard + b"=" * (-len(standard) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("not valid base64") from None


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed")  # noqa: TRY004 - what pydantic turns into a field's fault
    return value


Base64 = Annotated[
    bytes,
    BeforeValidator(_decode_base64, json_schema_input_type=str),
    Field(json_schema_extra={"format": "byte"}),
]
Int16 = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(2**15), lt=2**15)]
Size = Annotated[int, BeforeValidator(_no_bool), Field(ge=-1, lt=2**31)]


T = TypeVar("T")
Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""Validated up to the first fault: a body has room for millions, and only one is reported."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class TensorContents(_Message):
    """The elements, in the field for their datatype."""

    bytes_contents: Items[Base64] = Field((), description="of BYTES: each element in base64")
    int_contents: Items[Int16] = Field((), description="of INT16")


class InputTensorMessage(_Message):
    """One input. One size in `shape` may be -1; it follows from the number of elements."""

    name: str = Field(min_length=1)
    datatype: Literal["BYTES", "INT16"]
    shape: Annotated[Items[Size], Field(max_length=_MAX_RANK)]
    contents: TensorContents = Field(default_factory=lambda: TensorContents.model_validate({}))


class OutputTensorMessage(_Message):
    """A requested output."""

    name: str = Field(min_length=1)


class PredictRequest(_Message):
    """A ModelInferRequest for the request/response entry of a served model."""

    model_name: str
    model_version: str = ""
    id: str = Field("", description="repeated in the answer")
    inputs: Annotated[Items[InputTensorMessage], Field(min_length=1, max_length=_MAX_TENSORS)]
    outputs: Annotated[Items[OutputTensorMessage], Field(max_length=_MAX_TENSORS)] = Field(
        (), description="which outputs to return; none: all"
    )

    def prediction(self, *, request_id: str, deadline: float) -> Prediction:
        """Return the request for the upstream.

        Raises:
            InvalidRequestError: the elements of an input do not suit its datatype or shape.
        """
        return Prediction(
            request_id=request_id,
            model=self.model_name,
            inputs=tuple(_input(tensor, f"inputs.{number}") for number, tensor in enumerate(self.inputs)),
            outputs=tuple(output.name for output in self.outputs),
            version=self.model_version,
            deadline=deadline,
        )


class OutputTensorDocument(msgspec.Struct, frozen=True):
    """One output; its elements are the raw contents of the same position."""

    name: str
    datatype: str
    shape: list[str]


class PredictAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ModelInferResponse; each raw content is base64 of strings with a 4-byte length before each."""

    model_name: str
    outputs: list[OutputTensorDocument]
    raw_output_contents: list[bytes]
    model_version: str = ""
    id: str = ""


def read_predict_request(body: bytes) -> PredictRequest:
    """Read a request body.

    Raises:
        InvalidRequestError: not JSON, or not such a message; `param` is the dotted path of the field.
    """
    document = _supported(read_object(body), "")
    for name in ("inputs", "outputs"):
        tensors = document.get(name)
        if isinstance(tensors, list):
            document[name] = [
                _supported(tensor, f"{name}.{number}.") if isinstance(tensor, dict) else tensor
                for number, tensor in enumerate(tensors)
            ]
            for tensor in document[name]:
                if isinstance(tensor, dict) and isinstance(tensor.get("contents"), dict):
                    tensor["contents"] = _by_proto_names(tensor["contents"])
    return validate(PredictRequest, document)


def write_predict_answer(asked: PredictRequest, answer: PredictionAnswer) -> bytes:
    """Return the JSON of the answer to `asked`."""
    return msgspec.json.encode(
        PredictAnswer(
            model_name=asked.model_name,
            outputs=[
                OutputTensorDocument(tensor.name, tensor.datatype, [str(size) for size in tensor.shape])
                for tensor in answer.outputs
            ],
            raw_output_contents=[tensor.raw for tensor in answer.outputs],
            model_version=answer.version,
            id=asked.id,
        )
    )


_PROTO_NAMES = {
    to_camel(name): name
    for name in ("model_name", "model_version", "raw_input_contents", "bytes_contents", "int_contents")
}


def _supported(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Refuse fields that reach into the server, unless they are empty."""
    return without_neutral(_by_proto_names(message), {"parameters": {}, "raw_input_contents": []}, path)


def _by_proto_names(message: dict[str, Any]) -> dict[str, Any]:
    """Give fields written in lowerCamelCase, protobuf's default in JSON, the names of the .proto file."""
    return {_PROTO_NAMES.get(name, name): value for name, value in message.items()}


def _input(tensor: InputTensorMessage, path: str) -> InputTensor:
    strings, integers = tensor.contents.bytes_contents, tensor.contents.int_contents
    strange, field = (integers, "int_contents") if tensor.datatype == "BYTES" else (strings, "bytes_contents")
    if strange:
        raise InvalidRequestError(
            f"{path}.contents.{field}: not where elements of {tensor.datatype} go.",
            param=f"{path}.contents.{field}",
        )
    values: tuple[bytes, ...] | tuple[int, ...] = strings if tensor.datatype == "BYTES" else integers
    return InputTensor(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=_whole_shape(tensor.shape, len(values), f"{path}.shape"),
        values=values,
    )


def _whole_shape(shape: tuple[int, ...], count: int, path: str) -> tuple[int, ...]:
    """Return `shape` with its -1, if there is one, replaced by the size for `count` elements."""
    if shape.count(-1) > 1:
        raise InvalidRequestError(f"{path}: only one size may be -1.", param=path)
    known = math.prod(size for size in shape if size >= 0)
    if -1 in shape and known and count % known == 0:
        shape = tuple(count // known if size < 0 else size for size in shape)
    if -1 in shape or math.prod(shape) != count:
        raise InvalidRequestError(f"{path}: {list(shape)} does not hold {count} elements.", param=path)
    return shape
