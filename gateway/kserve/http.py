"""The KServe protocol over HTTP: `/v2/...`, as Triton serves it.

https://github.com/kserve/open-inference-protocol, with Triton's extensions for binary tensor data,
statistics, model configuration and model repository. Tensors are read into `gateway.kserve.contracts` types.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Send

from gateway.errors import ClientGoneError, InvalidRequestError
from gateway.http.routes import (
    AdminKey,
    GatewayDep,
    InferenceKey,
    OptionalBody,
    RecordDep,
    new_router,
    read_body,
)
from gateway.http.run import check_limits
from gateway.kserve.contracts import HEADER_LENGTH, MAX_RANK, MAX_TENSORS, VERSION, InferRequest, Tensor
from gateway.kserve.door import Door
from gateway.openai.document import read_object, read_optional_object, validate

_BINARY = "application/octet-stream"
_PIECE_BYTES = 2**20
_PIECE_NUMBERS = 2**15
"""A few milliseconds' work."""

_LENGTH = re.compile(r"[0-9]{1,12}")
_NOT_READY = 400
"""The protocol asks for a status of 4xx; this one is Triton's."""


async def _door(request: Request) -> Door:
    door: Door = request.app.state.door
    return door


DoorDep = Annotated[Door, Depends(_door)]

router = new_router(include_in_schema=False)
"""Not in the OpenAPI document: the protocol has one of its own."""


def no_bool(value: Any) -> Any:
    """Refuse true and false, which are numbers in Python, but not in JSON."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")  # noqa: TRY004 - what pydantic turns into a field's fault
    return value


T = TypeVar("T")
Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""Validated up to the first fault: a body has room for millions, and only one is reported."""
Size = Annotated[int, BeforeValidator(no_bool), Field(ge=-1, lt=2**31)]


class InputTensor(BaseModel):
    """What all requests say of an input."""

    name: str = Field(min_length=1)
    datatype: str
    shape: Annotated[Items[Size], Field(max_length=MAX_RANK)]


class OutputTensor(BaseModel):
    """What all requests say of a requested output."""

    name: str = Field(min_length=1)


class _Input(InputTensor):
    data: Any = None
    parameters: dict[str, Any] = {}


class _Output(OutputTensor):
    parameters: dict[str, Any] = {}


class _Body(BaseModel):
    """A request for inference; what has no effect on the answer is accepted, as by Triton."""

    id: str = ""
    inputs: Annotated[Items[_Input], Field(max_length=MAX_TENSORS)]
    outputs: Annotated[Items[_Output], Field(max_length=MAX_TENSORS)] = ()
    parameters: dict[str, Any] = {}


@router.get("/v2/health/live")
async def live() -> Response:
    """Tell that the process is alive."""
    return Response()


@router.get("/v2/health/ready")
async def ready(door: DoorDep) -> Response:
    """Tell whether requests will be served."""
    return Response(status_code=200 if door.ready() else _NOT_READY)


@router.get("/v2", dependencies=[InferenceKey])
async def server_metadata(door: DoorDep) -> Response:
    """Describe the server."""
    return JSONResponse(door.server_metadata())


@router.post("/v2/repository/index", dependencies=[InferenceKey])
async def index(body: OptionalBody, record: RecordDep, door: DoorDep) -> Response:
    """List the models."""
    document = read_optional_object(body)
    return JSONResponse(door.index(ready=document.get("ready") is True, key=record.key_name))


@router.post("/v2/repository/models/{model:path}/load", dependencies=[AdminKey])
async def load(model: str, body: OptionalBody, record: RecordDep, door: DoorDep) -> Response:
    """Load a model and wait until it answers."""
    parameters = read_optional_object(body).get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError("parameters: an object is needed.")
    record.model = await door.load(model, parameters)
    return Response()


@router.post("/v2/repository/models/{model:path}/unload", dependencies=[AdminKey])
async def unload(model: str, record: RecordDep, door: DoorDep) -> Response:
    """Unload a model and wait until it is gone."""
    record.model = await door.unload(model)
    return Response()


async def model_ready(model: str, door: DoorDep, record: RecordDep, version: str = "") -> Response:
    """Tell whether requests for a model will be served."""
    ready = door.model_ready(model, version, record.key_name)
    return Response(status_code=200 if ready else _NOT_READY)


def _telling(describe: Callable[[Door, str, str, str | None], Any]) -> Callable[..., Awaitable[Response]]:
    async def tell(door: DoorDep, record: RecordDep, model: str = "", version: str = "") -> Response:
        return JSONResponse(describe(door, model, version, record.key_name))

    return tell


async def infer(  # noqa: PLR0917 - FastAPI passes all by name
    request: Request, gateway: GatewayDep, record: RecordDep, door: DoorDep, model: str, version: str = ""
) -> Response:
    """Answer the questions of a request."""
    check_limits(gateway, record, door.admission(record.key_name, model))
    body = await read_body(request, gateway, record)
    header_length = request.headers.get(HEADER_LENGTH)
    inference, binary = await gateway.bodies.read(
        body, partial(read_infer_request, model, version, body, header_length)
    )
    outputs = await door.infer(inference, record, request.receive)
    gone = partial(record.fail, ClientGoneError("The client hung up, or did not read its answer."))
    return write_infer_answer(
        inference, outputs, binary, on_gone=gone, send_timeout_s=gateway.settings.send_timeout_s
    )


router.get("/v2/models/stats", dependencies=[InferenceKey])(_telling(Door.statistics))
for _path in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}"):
    router.get(_path + "/ready", dependencies=[InferenceKey])(model_ready)
    for _end, _describe in (("/config", Door.config), ("/stats", Door.statistics), ("", Door.metadata)):
        router.get(_path + _end, dependencies=[InferenceKey])(_telling(_describe))
    router.post(_path + "/infer", dependencies=[InferenceKey])(infer)


def read_infer_request(
    model: str, version: str, body: bytes, header_length: str | None = None
) -> tuple[InferRequest, Callable[[str], bool]]:
    """Read the body of a request for inference: JSON, perhaps with binary data of tensors behind it.

    Args:
        model: from the path, as `version`, which may be empty.
        version: see `model`.
        body: all of it.
        header_length: how many bytes of it are JSON; None: all.

    Returns:
        The request, and a function that tells of an output's name whether its data shall be binary.

    Raises:
        InvalidRequestError: not such a body; the message names the field.
    """
    end = len(body)
    if header_length is not None:
        if not (_LENGTH.fullmatch(header_length) and int(header_length) <= end):
            raise InvalidRequestError(f"{HEADER_LENGTH} is not a length within the body.")
        end = int(header_length)
    message = validate(_Body, read_object(body[:end]))
    inputs = []
    for number, tensor in enumerate(message.inputs):
        path = f"inputs.{number}"
        _refuse(tensor.parameters, path)
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            elements: Sequence[Any] | bytes = _flat(tensor.data, f"{path}.data")
        elif type(size) is int and 0 <= size <= len(body) - end and header_length is not None:
            elements, end = body[end : end + size], end + size
        else:
            raise InvalidRequestError(f"{path}.parameters.binary_data_size: not so much data follows.")
        inputs.append(Tensor.read(tensor.name, tensor.datatype, tensor.shape, elements, path=path, at="data"))
    if end < len(body):
        raise InvalidRequestError(f"The body has {len(body) - end} bytes that belong to no input.")
    by_default = message.parameters.get("binary_data_output") is True
    binary = {}
    for number, output in enumerate(message.outputs):
        _refuse(output.parameters, f"outputs.{number}")
        binary[output.name] = output.parameters.get("binary_data", by_default) is True
    timeout_us = message.parameters.get("timeout", 0)
    if type(timeout_us) is not int or not 0 <= timeout_us < 2**63:
        raise InvalidRequestError("parameters.timeout: a number of microseconds is needed.")
    request = InferRequest(
        model=model,
        version=version,
        id=message.id,
        inputs=inputs,
        outputs=list(binary),
        timeout_us=timeout_us,
    )
    return request, lambda name: binary.get(name, by_default)


def write_infer_answer(
    request: InferRequest,
    outputs: Sequence[Tensor],
    binary: Callable[[str], bool],
    *,
    on_gone: Callable[[], None],
    send_timeout_s: float,
) -> Response:
    """Return the response to `request`; the data of outputs that are `binary` follow its JSON.

    One that is sent in pieces calls `on_gone` if its client leaves, or does not read one for so long.
    """
    pieces = partial(Pieces, on_gone=on_gone, send_timeout_s=send_timeout_s)
    documents: list[dict[str, Any]] = []
    blobs: list[bytes | memoryview] = []
    numbers: memoryview[float] | None = None
    for tensor in outputs:
        document: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if binary(tensor.name):
            blobs.append(tensor.packed())
            document["parameters"] = {"binary_data_size": len(blobs[-1])}
        elif isinstance(tensor.values, memoryview):
            numbers = tensor.values
        else:
            document["data"] = [
                value.decode() if isinstance(value, bytes) else value for value in tensor.values
            ]
        documents.append(document)
    head = {"id": request.id} if request.id else {}
    head |= {"model_name": request.model, "model_version": VERSION}
    text = msgspec.json.encode({**head, "outputs": documents})
    if numbers is not None:  # the model's only output
        return pieces(_with_numbers(text, numbers), media_type="application/json")
    if not blobs:
        return Response(text, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(text))}
    size = sum(map(len, blobs))
    if size <= _PIECE_BYTES:
        return Response(text + b"".join(blobs), media_type=_BINARY, headers=headers)
    headers["Content-Length"] = str(len(text) + size)
    return pieces(_in_pieces([text, *blobs]), media_type=_BINARY, headers=headers)


class Pieces(StreamingResponse):
    """An answer that is made in pieces on threads, as its client reads them, and may be given up.

    Args:
        content: the pieces.
        on_gone: called if the client left, or did not read a piece within `send_timeout_s` seconds.
        send_timeout_s: see `on_gone`.
        answer: what Starlette's takes.
    """

    def __init__(
        self, content: Iterator[bytes], *, on_gone: Callable[[], None], send_timeout_s: float, **answer: Any
    ) -> None:
        super().__init__(content, **answer)
        self._on_gone = on_gone
        self._send_timeout_s = send_timeout_s

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Wait until the client leaves."""
        await super().listen_for_disconnect(receive)
        self._on_gone()

    async def stream_response(self, send: Send) -> None:
        """Send the pieces. Where they stop before their end, the server closes the connection."""

        async def write(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await super().stream_response(write)
        except TimeoutError:
            self._on_gone()


def _in_pieces(blobs: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    for blob in blobs:
        for at in range(0, len(blob), _PIECE_BYTES):
            yield bytes(blob[at : at + _PIECE_BYTES])


def _with_numbers(text: bytes, numbers: "memoryview[float]") -> Iterator[bytes]:
    """Yield an answer's JSON with the data of its last output: numbers take five times as much as text."""
    end = b"}]}"
    yield text.removesuffix(end) + b',"data":['
    for at in range(0, len(numbers), _PIECE_NUMBERS):
        piece = msgspec.json.encode(numbers[at : at + _PIECE_NUMBERS].tolist())[1:-1]
        yield b"," + piece if at else piece
    yield b"]" + end


def _flat(data: Any, path: str) -> list[Any]:
    """Return the elements of `data`, which may be nested like the shape, or flat."""
    for _ in range(MAX_RANK):
        if not (isinstance(data, list) and data and all(type(each) is list for each in data)):
            break
        data = list(chain.from_iterable(data))
    if isinstance(data, list):
        return data
    raise InvalidRequestError(f"{path}: a list of elements is needed.", param=path)


def _refuse(parameters: Mapping[str, Any], path: str) -> None:
    """Refuse what reaches into the server's memory, or asks for another kind of output."""
    for name in ("shared_memory_region", "classification"):
        if parameters.get(name):
            raise InvalidRequestError(f"{path}.parameters.{name}: not supported here.")
