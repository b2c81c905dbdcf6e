"""The KServe protocol over gRPC: `inference.GRPCInferenceService`, as Triton serves it, and health beside it.

Each call, and each request of a stream, has a record of its own: key, limits, metrics, trace and log line are
those of HTTP requests. Methods that the gateway does not offer are refused by name. Tensors are read into
`gateway.kserve.contracts` types.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from http import HTTPStatus
from io import BytesIO
from time import perf_counter
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from gateway.errors import (
    BodyTimeoutError,
    GatewayError,
    InvalidRequestError,
    ListenError,
    MethodNotAllowedError,
)
from gateway.http.record import Records, RequestRecord
from gateway.http.run import check_limits
from gateway.http.tls import Certificate
from gateway.kserve.contracts import BYTES, INT64, MAX_TENSORS, VERSION, InferRequest, Tensor
from gateway.kserve.door import Door
from gateway.settings.values import Scope

_SERVICE: Final = "inference.GRPCInferenceService"
_METHODS: Final = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
_HEALTH: Final = "grpc.health.v1.Health"
"""What Kubernetes asks: https://github.com/grpc/grpc/blob/master/doc/health-checking.md."""
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
"""A HealthCheckResponse, as `_SERVING`."""
_AHEAD: Final = 64
"""Requests of one stream that are served at once."""
_LONGEST_MESSAGE: Final = 1000
"""In characters: gRPC sends a status message in a header of at most 16 KiB, with non-ASCII bytes as `%XX`."""
_FINAL: Final = service_pb2.ModelInferResponse(
    parameters={"triton_final_response": service_pb2.InferParameter(bool_param=True)}
).SerializeToString()
"""What marks an answer as the final one of its request."""

_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the status of an error over HTTP; all others are INTERNAL."""
_CONTENTS: Final = {BYTES: "bytes_contents", INT64: "int64_contents"}
"""Where elements of a datatype are that are not raw."""
_PROBES: Final = ("ServerLive", "ServerReady")
_INFERENCE: Final = ("ModelInfer", "ModelStreamInfer")
_ADMIN: Final = ("RepositoryModelLoad", "RepositoryModelUnload")

_Bytes = bytes | memoryview
_INFER_RESPONSE: Final = 2
"""A field's number in ModelStreamInferResponse."""
_RAW_CONTENTS: Final = 6
"""A field's number in ModelInferResponse."""
_LARGE: Final = 2**20
"""Bytes that are copied within a millisecond."""


class _Refusal(NamedTuple):
    """How a request ends without an answer; an error would hold what it was raised in."""

    code: grpc.StatusCode
    message: str
    id: str = ""
    """The request's, where it is one of a stream."""


class _Answer(NamedTuple):
    """A serialised message in parts, and what it holds until it was sent."""

    parts: list[_Bytes]
    held: ExitStack


class GrpcServer:
    """Serves `door` at one address.

    Args:
        door: what is served.
        records: of the gateway.
        certificate: for TLS; None: without.
    """

    def __init__(self, door: Door, records: Records, certificate: Certificate | None = None) -> None:
        self._door = door
        self._gateway = door.gateway
        self._records = records
        self._certificate = certificate
        self._server: grpc.aio.Server | None = None
        self._documents: dict[str, Callable[[Any, str | None], dict[str, Any]]] = {
            "ServerLive": lambda *_: {"live": True},
            "ServerReady": lambda *_: {"ready": door.ready()},
            "ModelReady": lambda request, key: {
                "ready": door.model_ready(request.name, request.version, key)
            },
            "ServerMetadata": lambda *_: door.server_metadata(),
            "ModelMetadata": lambda request, key: door.metadata(request.name, request.version, key),
            "ModelConfig": lambda request, key: {"config": door.config(request.name, request.version, key)},
            "ModelStatistics": lambda request, key: door.statistics(request.name, request.version, key),
            "RepositoryIndex": lambda request, key: {"models": door.index(ready=request.ready, key=key)},
        }
        """The answers that need no waiting, as protobuf's JSON, to a request and the name of its key."""

    async def start(self, address: str) -> None:
        """Begin to serve at `address`, host:port; other processes of this gateway may do so, too.

        Raises:
            ListenError: another program has the address.
        """
        settings = self._gateway.settings
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=2 * (settings.max_in_flight + settings.max_waiting) + _AHEAD,
            options=(
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.so_reuseport", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", 60_000),
            ),
        )
        handlers = {name: self._handler(name) for name in _METHODS}
        check = grpc.stream_unary_rpc_method_handler(self._check)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_SERVICE, handlers),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        try:
            if self._certificate is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, _credentials(self._certificate))
        except RuntimeError:
            raise ListenError(f"cannot listen on {address} for gRPC: the address is in use") from None
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cancel after `grace_s` those that still run."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _handler(self, name: str) -> Any:
        # Without a deserialiser, so that what is no message gets a status of ours.
        if name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)

        async def unary(_: AsyncIterator[bytes], context: Any) -> bytes:
            unsent: set[ExitStack] = set()
            context.add_done_callback(lambda _: _release(unsent))
            answer = await self._serve(name, partial(self._message, context), context, unsent)
            if isinstance(answer, _Refusal):
                await context.abort(answer.code, answer.message)
            return await _joined(answer.parts)

        # As a stream of one request, whose message comes only when it is asked for.
        return grpc.stream_unary_rpc_method_handler(unary)

    async def _check(self, _: AsyncIterator[bytes], context: Any) -> bytes:
        """Tell a probe whether requests will be served, whichever service it names: Triton does so, too."""
        headers, route = _metadata_of(context), f"/{_HEALTH}/Check"
        async with self._records.opened(
            method="GRPC", headers=headers, client=_client_of(context), route=lambda: route, probe=True
        ) as record:
            await self._records.admit(record)
            record.status = HTTPStatus.OK
            return _SERVING if self._door.ready() else _NOT_SERVING

    async def _message(self, context: Any) -> bytes:
        """Receive the only message of a call."""
        timeout_s = self._gateway.settings.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await context.read()
        except TimeoutError:
            raise BodyTimeoutError(f"The message did not arrive within {timeout_s:g} seconds.") from None
        if message is grpc.aio.EOF:
            raise InvalidRequestError("This call has no message.")
        return bytes(message)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serve each request of a stream, several at once; the answers come in the requests' order.

        An error is part of the answers, with its request's id, unless the metadata ask for the status of the
        first one to end the stream. Each request has one answer, which is marked as its final one, so no
        empty final response follows, whether the client requested one or not.
        """
        metadata = _metadata_of(context)
        try:
            self._authorize("ModelStreamInfer", metadata)
        except GatewayError:  # as there, where it has a record
            refusal = await self._serve("ModelStreamInfer", partial(_there, b""), context, set())
            await context.abort(refusal.code, refusal.message)
        ends = metadata.get("triton_grpc_error") == "true"
        answers: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_AHEAD)
        running: set[asyncio.Task[Any]] = set()
        unsent: set[ExitStack] = set()

        async def serve(data: bytes) -> Any:
            answer = await self._serve("ModelStreamInfer", partial(_there, data), context, unsent)
            if isinstance(answer, _Refusal):
                answer = answer._replace(id=await self._gateway.bodies.read(data, partial(_id_of, data)))
            return answer

        async def read() -> None:
            async for data in requests:
                task = asyncio.create_task(serve(data))
                running.add(task)
                task.add_done_callback(running.discard)
                await answers.put(task)
            await answers.put(None)

        reading = asyncio.create_task(read())
        try:
            while (task := await answers.get()) is not None:
                answer = await task
                if isinstance(answer, _Refusal):
                    if ends:
                        await context.abort(answer.code, answer.message)
                    message = service_pb2.ModelStreamInferResponse(error_message=answer.message)
                    message.infer_response.id = answer.id
                    yield message.SerializeToString()
                else:
                    yield await _joined(_field(_INFER_RESPONSE, *answer.parts, _FINAL))
                    unsent.discard(answer.held)
                    answer.held.close()
        finally:
            for each in (reading, *running):
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(reading, *running, return_exceptions=True)
            _release(unsent)

    async def _serve(
        self,
        name: str,
        receive: Callable[[], Awaitable[bytes]],
        context: Any,
        unsent: set[ExitStack],
    ) -> Any:
        """Serve one request; return its answer, or the status that it ends with.

        Its message is received once its key is known and there is a place for it. What the answer holds is
        among `unsent` then.
        """
        metadata = _metadata_of(context)
        route = f"/{_SERVICE}/{name}"
        async with self._records.opened(
            method="GRPC",
            headers=metadata,
            client=_client_of(context),
            route=lambda: route,
            probe=name in _PROBES,
        ) as record:
            try:
                await self._records.admit(record)
                record.key_name = self._authorize(name, metadata)
                if name in _INFERENCE:
                    check_limits(self._gateway, record, self._door.admission(record.key_name))
                remaining_s = context.time_remaining()
                if remaining_s is not None:
                    limit = asyncio.get_running_loop().time() + remaining_s
                    record.deadline = min(record.deadline, limit)
                began = perf_counter()
                data = await receive()
                record.waited_s += perf_counter() - began
                answer = await self._answer(name, await self._received(name, data, record), record)
            except GatewayError as error:
                record.fail(error)
                return _refused(error)
            except Exception:  # noqa: BLE001 - the outermost frame of a request: the server goes on
                return _refused(record.fail_unexpectedly())
            record.status = HTTPStatus.OK
            held = record.answer.pop_all()
            unsent.add(held)
            return _Answer(answer, held)

    def _authorize(self, name: str, metadata: Mapping[str, str]) -> str | None:
        """Check that the caller may use the method; return the key's name, if one is needed."""
        if name in _ADMIN:
            return self._gateway.authorize_admin(metadata)
        if name in _PROBES:
            return None
        return self._gateway.keyring.authorize(metadata, Scope.INFERENCE)

    async def _received(self, name: str, data: bytes, record: RequestRecord) -> Any:
        """Count the bytes of a request among those that are held; return the message, or what it asks."""
        bodies = self._gateway.bodies
        bodies.hold(len(data))
        record.resources.callback(bodies.release, len(data))
        bodies.keep(data, record.resources)

        def read() -> Any:
            try:
                request = GetMessageClass(_METHODS[name].input_type).FromString(data)
            except DecodeError:
                raise InvalidRequestError("This is not the message that the method takes.") from None
            if self._gateway.settings.log_prompts:
                record.body = json_format.MessageToJson(request, indent=None).encode()
            return _read(request) if name in _INFERENCE else request

        return await bodies.read(data, read)

    async def _answer(self, name: str, request: Any, record: RequestRecord) -> "list[_Bytes]":
        if name in _INFERENCE:
            return _write(request, await self._door.infer(request, record, _connected))
        answer = GetMessageClass(_METHODS[name].output_type)()
        if name in self._documents:
            json_format.ParseDict(self._documents[name](request, record.key_name), answer)
        elif name == "RepositoryModelLoad":
            record.model = await self._door.load(request.model_name, dict(request.parameters))
        elif name == "RepositoryModelUnload":
            record.model = await self._door.unload(request.model_name)
        else:
            raise MethodNotAllowedError(f"The gateway does not offer {name}.")
        return [answer.SerializeToString()]


def _metadata_of(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}


def _client_of(context: Any) -> str | None:
    """Return the peer's address, which gRPC writes as `ipv4:192.0.2.7:4711` or `ipv6:%5B::1%5D:4711`."""
    kind, _, address = unquote(context.peer()).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None


def _release(unsent: set[ExitStack]) -> None:
    """Release what answers hold of which nothing will be sent any more."""
    while unsent:
        unsent.pop().close()


async def _there(data: bytes) -> bytes:
    return data


async def _connected() -> Mapping[str, str]:
    """Wait for ever: a client's hang-up cancels the call's task."""
    await asyncio.Event().wait()
    raise AssertionError


def _id_of(data: bytes) -> str:
    """Return the id of a request for inference; of what is no message, an empty one."""
    try:
        return str(service_pb2.ModelInferRequest.FromString(data).id)
    except DecodeError:
        return ""


def _read(request: Any) -> InferRequest:
    """Read a ModelInferRequest.

    Raises:
        InvalidRequestError: its tensors are not consistent; the message names the field.
    """
    if max(len(request.inputs), len(request.outputs)) > MAX_TENSORS:
        raise InvalidRequestError(f"inputs: more than {MAX_TENSORS} tensors.")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError("raw_input_contents: not as many as there are inputs.")
    for tensor in (*request.inputs, *request.outputs):
        for name in ("shared_memory_region", "classification"):
            if name in tensor.parameters:
                raise InvalidRequestError(f"{tensor.name[:40]}: the parameter {name} is not supported here.")
    inputs = []
    for number, tensor in enumerate(request.inputs):
        path, contents = f"inputs.{number}", tensor.contents
        field = _CONTENTS.get(tensor.datatype, "int_contents")
        elements, at = getattr(contents, field), f"contents.{field}"
        if raw and tensor.HasField("contents"):
            raise InvalidRequestError(f"{path}.contents: raw_input_contents are there, too.")
        if raw:
            elements, at = raw[number], "contents"
        inputs.append(Tensor.read(tensor.name, tensor.datatype, tensor.shape, elements, path=path, at=at))
    return InferRequest(
        model=request.model_name,
        version=request.model_version,
        id=request.id,
        inputs=inputs,
        outputs=[output.name for output in request.outputs],
        timeout_us=_timeout_us(request),
    )


def _timeout_us(request: Any) -> int:
    if "timeout" not in request.parameters:
        return 0
    timeout = request.parameters["timeout"]
    if timeout.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidRequestError("parameters.timeout: an int64_param of microseconds is needed.")
    return max(int(timeout.int64_param), 0)


def _write(request: InferRequest, outputs: Sequence[Tensor]) -> list[_Bytes]:
    """Return the parts of a serialised ModelInferResponse: some hundred MiB are not copied into a message."""
    response = service_pb2.ModelInferResponse(model_name=request.model, model_version=VERSION, id=request.id)
    for tensor in outputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    parts: list[_Bytes] = [response.SerializeToString()]
    for tensor in outputs:
        parts += _field(_RAW_CONTENTS, tensor.packed())
    return parts


def _field(number: int, *parts: _Bytes) -> list[_Bytes]:
    """Return a field of a message that holds `parts` together: a message, or bytes.

    Its tag and its length come first, as in https://protobuf.dev/programming-guides/encoding. Serialised
    messages may be joined: the fields of all are those of one.
    """
    return [_varint(number << 3 | 2) + _varint(sum(map(len, parts))), *parts]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits, and one that says that more follow
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


async def _joined(parts: Sequence[_Bytes]) -> bytes:
    """Join the parts of a message, of a large one on a thread and bit by bit: others are served meanwhile."""
    if sum(map(len, parts)) <= _LARGE:
        return b"".join(parts)

    def join() -> bytes:
        whole = BytesIO()
        for part in parts:
            for at in range(0, len(part), _LARGE):
                whole.write(part[at : at + _LARGE])
        return whole.getvalue()

    return await asyncio.to_thread(join)


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return what gRPC asks for the certificate at each handshake."""

    def newest() -> Any:
        return grpc.ssl_server_certificate_configuration([certificate.newest])

    return grpc.dynamic_ssl_server_credentials(newest(), newest)


def _refused(error: GatewayError) -> _Refusal:
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    return _Refusal(code, error.message[:_LONGEST_MESSAGE])
