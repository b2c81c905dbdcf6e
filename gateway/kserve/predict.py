"""`POST /MutilBackendService/Predict` (its clients spell it so): ModelInferRequest as protobuf JSON.

The messages are those of the KServe inference protocol, version 2; the mapping to JSON is protobuf's
(https://protobuf.dev/programming-guides/json): fields by either of their names, 64-bit integers as strings,
bytes as base64. protobuf's own reader is not used: it takes any text for base64 and does not always name the
field at fault. Of the messages' fields, those that reach into the server (shared memory, raw contents,
parameters) are refused.
"""

import base64
import binascii
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from starlette.responses import Response

from gateway.errors import InvalidRequestError
from gateway.http.openapi import body_of, complete
from gateway.http.routes import GatewayDep, InferenceKey, RecordDep, new_router, read_json
from gateway.kserve.contracts import MAX_TENSORS, VERSION, InferRequest, Tensor
from gateway.kserve.http import DoorDep, InputTensor, Items, OutputTensor, no_bool
from gateway.openai.document import read_object, validate

router = new_router(InferenceKey)


def _decode_base64(value: Any) -> bytes:
    """Read base64 of either alphabet, with or without its padding, as protobuf's JSON may be written."""
    if not isinstance(value, str):
        raise ValueError("base64 text is needed")  # noqa: TRY004 - what pydantic turns into a field's fault
    try:
        standard = value.encode("ascii").translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
        return base64.b64decode(standard + b"=" * (-len(standard) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("not valid base64") from None


Base64 = Annotated[
    bytes,
    BeforeValidator(_decode_base64, json_schema_input_type=str),
    Field(json_schema_extra={"format": "byte"}),
]
Int16 = Annotated[int, BeforeValidator(no_bool), Field(ge=-(2**15), lt=2**15)]


def _nothing(value: Any) -> Any:
    if value not in (None, [], {}):
        raise ValueError("not supported here")
    return value


NoParameters = Annotated[
    Any, AfterValidator(_nothing), WithJsonSchema({"type": "object", "maxProperties": 0})
]
NoContents = Annotated[Any, AfterValidator(_nothing), WithJsonSchema({"type": "array", "maxItems": 0})]


class _Message(BaseModel):
    """Fields have the names of the .proto file, or those of protobuf's JSON by default, in lowerCamelCase."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        alias_generator=AliasGenerator(validation_alias=lambda name: AliasChoices(name, to_camel(name))),
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, document: Any) -> Any:
        """Leave out fields that are null: protobuf's JSON may say so of any."""
        if not isinstance(document, dict):
            return document
        return {name: value for name, value in document.items() if value is not None}


class TensorContents(_Message):
    """The elements, in the field for their datatype."""

    bytes_contents: Items[Base64] = Field((), description="of BYTES: each element in base64")
    int_contents: Items[Int16] = Field((), description="of INT16")
    bool_contents: NoContents = None
    int64_contents: NoContents = None
    uint_contents: NoContents = None
    uint64_contents: NoContents = None
    fp32_contents: NoContents = None
    fp64_contents: NoContents = None


class InputTensorMessage(_Message, InputTensor):
    """One input. One size in `shape` may be -1; it follows from the number of elements."""

    datatype: Literal["BYTES", "INT16"]
    parameters: NoParameters = None
    contents: TensorContents = Field(default_factory=lambda: TensorContents.model_validate({}))

    def tensor(self, path: str) -> Tensor:
        """Return the tensor; `path` is its name in the request."""
        places = ("bytes_contents", "int_contents")
        at, other = places if self.datatype == "BYTES" else reversed(places)
        if getattr(self.contents, other):
            path = f"{path}.contents.{other}"
            raise InvalidRequestError(f"{path}: not where elements of {self.datatype} go.", param=path)
        elements = getattr(self.contents, at)
        return Tensor.read(self.name, self.datatype, self.shape, elements, path=path, at=f"contents.{at}")


class OutputTensorMessage(_Message, OutputTensor):
    """A requested output."""

    parameters: NoParameters = None


class PredictRequest(_Message):
    """A ModelInferRequest for a served model."""

    model_name: str
    model_version: str = ""
    id: str = Field("", description="repeated in the answer")
    inputs: Annotated[Items[InputTensorMessage], Field(min_length=1, max_length=MAX_TENSORS)]
    outputs: Annotated[Items[OutputTensorMessage], Field(max_length=MAX_TENSORS)] = Field(
        (), description="which outputs to return; none: all"
    )
    parameters: NoParameters = None
    raw_input_contents: NoContents = None


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


@router.post(
    "/MutilBackendService/Predict",
    response_class=Response,
    openapi_extra=body_of(PredictRequest),
    responses=complete(PredictAnswer),
)
async def predict(request: Request, gateway: GatewayDep, record: RecordDep, door: DoorDep) -> Response:
    """Answer a ModelInferRequest in protobuf's JSON."""
    body = await read_json(request, gateway, record, door.admission(record.key_name))
    inference = await gateway.bodies.read(body, partial(read_predict_request, body))
    answer = write_predict_answer(inference, await door.infer(inference, record, request.receive))
    return Response(answer, media_type="application/json")


def read_predict_request(body: bytes) -> InferRequest:
    """Read a request body.

    Raises:
        InvalidRequestError: not JSON, or not such a message; `param` is the dotted path of the field.
    """
    message = validate(PredictRequest, read_object(body))
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        inputs=[tensor.tensor(f"inputs.{number}") for number, tensor in enumerate(message.inputs)],
        outputs=[output.name for output in message.outputs],
    )


def write_predict_answer(request: InferRequest, outputs: Sequence[Tensor]) -> bytes:
    """Return the JSON of the answer to `request`."""
    return msgspec.json.encode(
        PredictAnswer(
            model_name=request.model,
            outputs=[
                OutputTensorDocument(tensor.name, tensor.datatype, [str(size) for size in tensor.shape])
                for tensor in outputs
            ],
            raw_output_contents=[bytes(tensor.packed()) for tensor in outputs],
            model_version=VERSION,
            id=request.id,
        )
    )
