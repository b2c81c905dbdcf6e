"""A Triton to test against: a real grpc.aio server whose models are scripted, no tensor ever computed."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio
import msgspec
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from gateway.core.request import Conversation, Generation, Message
from tests.ports import free_ports
from wire.channel import Frame, encode_frame
from wire.meta import Accepted, Delivered, Logits, Meta, ProbeReport, Tokenized, Usage, encode_meta
from wire.refusal import RefusalCode, refusal_text
from wire.request import (
    Cancel,
    Detokenize,
    OpenChannel,
    Probe,
    Request,
    Tokenize,
    TokenizerFiles,
    decode_request,
)
from wire.request import Generation as Asked
from wire.strings import pack_strings, unpack_strings

Response: TypeAlias = service_pb2.ModelStreamInferResponse
Script = Callable[[Any, Any], AsyncIterator[Response]]
Predict = Callable[[Any, Any], Awaitable[service_pb2.ModelInferResponse]]


def having(inputs: Iterable[str]) -> service_pb2.ModelMetadataResponse:
    """What Triton says of an entry with these inputs."""
    made = service_pb2.ModelMetadataResponse(name="m")
    for name in inputs:
        made.inputs.add(name=name)
    return made


def reply(text: str | bytes = "", meta: Meta | bytes | None = None, *, final: bool = False) -> Response:
    """One response of a model, as Triton sends it."""
    response = service_pb2.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = final
    document = meta if isinstance(meta, bytes) else encode_meta(meta or Meta())
    content = text.encode() if isinstance(text, str) else text
    for name, value in (("response", content), ("meta", document)):
        response.outputs.add(name=name, datatype="BYTES", shape=(1, 1))
        response.raw_output_contents.append(pack_strings([value]))
    return Response(infer_response=response)


def empty_final() -> Response:
    response = service_pb2.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = True
    return Response(infer_response=response)


def accepted(prompt_tokens: int = 5) -> Response:
    return reply(meta=Meta(accepted=Accepted(request_id="r", prompt_tokens=prompt_tokens)))


def part_of_logits(first: int) -> Response:
    """Those of one token, of a model that has but one id."""
    return reply(b"\0\0\0\0", Meta(logits=Logits(first=first, vocabulary=1)))


def finished(text: str = "", tokens: int = 0, *, completion_tokens: int = 2) -> Response:
    """An end, also of a streamed answer of which nothing came over its channel."""
    usage = Usage(prompt_tokens=5, completion_tokens=completion_tokens)
    delivered = Delivered(deltas=0, frame=0)
    return reply(
        text, Meta(tokens=tokens, finish_reason="stop", usage=usage, delivered=delivered), final=True
    )


async def hello(request: Any, context: Any) -> AsyncIterator[Response]:
    """A short answer in two deltas."""
    yield accepted()
    yield reply("Hel", Meta(tokens=1))
    yield finished("lo", 1)


async def two_ids(request: Any, context: Any) -> AsyncIterator[Response]:
    """The ids of any text."""
    yield reply(meta=Meta(tokenized=Tokenized(ids=[0, 5])), final=True)


async def quiet(request: Any, context: Any) -> AsyncIterator[Response]:
    """A delta channel that is opened and carries nothing."""
    yield reply(meta=encode_frame(Frame(frame=0)))
    await asyncio.Event().wait()


async def repeat(request: Any, context: Any) -> service_pb2.ModelInferResponse:
    """An answer of a request/response entry: its prompt."""
    answer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1")
    answer.outputs.add(name="response", datatype="BYTES", shape=request.inputs[0].shape)
    answer.raw_output_contents.append(request.raw_input_contents[0])
    return answer


def inputs_of(request: service_pb2.ModelInferRequest) -> dict[str, bytes]:
    return {
        tensor.name: unpack_strings(raw)[0]
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }


@dataclass
class FakeModel:
    """A repository entry: what it says of itself, and the scripts by which it answers."""

    inputs: tuple[str, ...] = ("prompt", "history", "sampling")
    shape: tuple[int, ...] = (-1, 1)
    declared: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Datatype and shape of inputs that differ from the others."""
    decoupled: bool = False
    predict: Predict = repeat
    state: str = "READY"
    reason: str = ""
    answer: Script = hello
    probe: Script | None = None
    channel: Script = quiet
    """What answers the requests that open delta channels."""
    tokenize: Script = two_ids
    report: ProbeReport = field(
        default_factory=lambda: ProbeReport(
            heartbeat_age_s=0.01, running=0, waiting=0, format="chatglm3", max_context=512
        )
    )
    files: bytes | None = None
    """Those of its tokenizer; None: it is older than the question."""
    asked_for_files: int = 0
    """How often it was."""
    begun: int = 0
    """Generations, of which its report tells."""
    obeys: bool = True
    """Whether a generation ends when it is told so."""
    probes: int = 0
    load: Callable[[Any], Awaitable[None]] | None = None
    """What loading does instead of succeeding at once, given the call's context."""
    lingers: asyncio.Event | None = None
    """What is waited for, from an unload on, until nothing of it is in memory: requests in flight."""

    async def send_files(self, request: Any, context: Any) -> AsyncIterator[Response]:
        """Send the tokenizer's files in two parts."""
        self.asked_for_files += 1
        if self.files is None:
            unknown = "sampling: Object contains unknown field `tokenizer_files`"
            yield Response(error_message=refusal_text(RefusalCode.INVALID_REQUEST, unknown))
            return
        half = len(self.files) // 2
        yield reply(self.files[:half])
        yield reply(self.files[half:], final=True)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The server. It can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.name = "triton"
        self.version = "2.71.0"
        self.models = {"m": FakeModel()}
        self.port = 0
        self.live = True
        self.credentials: grpc.ServerCredentials | None = None
        self.restriction: tuple[str, str] | None = None
        """The header, and its value, that the repository is restricted by."""
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.half_closed = 0
        self.orders: list[str] = []
        """`load NAME` and `unload NAME`, as they came."""
        self.answers = asyncio.Event()
        """Unset: it hangs when it is asked what is in its repository."""
        self.answers.set()
        self._unloading: set[asyncio.Task[None]] = set()
        self.cancelled = asyncio.Event()
        """Set once a request was cancelled, in whichever way."""
        self.told: list[str] = []
        """Of which requests the model was told that they are cancelled."""
        self.resets = 0
        """Streams that were cancelled, but for delta channels."""
        self.running: dict[str, asyncio.Event] = {}
        """What ends each generation that can be cancelled, by its name."""
        self._server: grpc.aio.Server | None = None

    @property
    def model(self) -> FakeModel:
        return self.models["m"]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = self.port or free_ports(1)[0]  # still its own when it is started again
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.credentials)
        await self._server.start()

    async def stop(self) -> None:
        for task in self._unloading:
            task.cancel()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - Triton's names
        self.metadata.append(dict(context.invocation_metadata()))
        return service_pb2.ServerLiveResponse(live=self.live)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name=self.name, version=self.version)

    async def _permit(self, context: Any) -> None:
        if self.restriction is not None and self.restriction not in context.invocation_metadata():
            told = f"This protocol is restricted, expecting header '{self.restriction[0]}'"
            await context.abort(grpc.StatusCode.UNAVAILABLE, told)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._permit(context)
        await self.answers.wait()
        index = service_pb2.RepositoryIndexResponse()
        for name, model in self.models.items():
            index.models.add(name=name, version="1", state=model.state, reason=model.reason)
        return index

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._permit(context)
        self.orders.append(f"load {request.model_name}")
        model = self.models[request.model_name]
        model.state, model.reason = "LOADING", ""
        if model.load is not None:
            try:
                await model.load(context)
            except BaseException:
                model.state, model.reason = "UNAVAILABLE", "Internal: it failed"
                raise
        model.state = "READY"
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._permit(context)
        self.orders.append(f"unload {request.model_name}")
        model = self.models[request.model_name]
        model.state = "UNLOADING"

        async def end() -> None:
            if model.lingers is not None:
                await model.lingers.wait()
            model.state, model.reason = "UNAVAILABLE", "unloaded"

        self._unloading.add(asyncio.create_task(end()))
        return service_pb2.RepositoryModelUnloadResponse()

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = self.models.get(request.name)
        return service_pb2.ModelReadyResponse(ready=model is not None and model.state == "READY")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = await self._ready(request.name, context)
        answer = service_pb2.ModelMetadataResponse(name=request.name, versions=["1"], platform="python")
        for name in model.inputs:
            datatype, shape = model.declared.get(name, ("BYTES", model.shape))
            answer.inputs.add(name=name, datatype=datatype, shape=shape)
        for name in ("response", "meta"):
            answer.outputs.add(name=name, datatype="BYTES", shape=(-1, 1))
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = await self._ready(request.name, context)
        config = model_config_pb2.ModelConfig(name=request.name, backend="python")
        config.model_transaction_policy.decoupled = model.decoupled
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = await self._ready(request.model_name, context)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            return await model.predict(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        kind: Request | None = None
        try:
            async for request in requests:
                kind = decode_request(inputs_of(request)["sampling"])
                async for response in self._serve(request, kind, context):
                    yield response
            self.half_closed += 1
        except (asyncio.CancelledError, GeneratorExit):  # grpc drops a generator that is between responses
            if not isinstance(kind, OpenChannel):
                self.resets += 1
                self.cancelled.set()
            raise

    async def _serve(self, request: Any, kind: Request, context: Any) -> AsyncIterator[Response]:
        model = self.models.get(request.model_name)
        if model is None or model.state != "READY":
            missing = "is not found" if model is None else "has no available versions"
            yield Response(error_message=f"Request for unknown model: '{request.model_name}' {missing}")
            return
        script = model.answer
        if isinstance(kind, OpenChannel):
            script = model.channel
        elif isinstance(kind, Cancel):
            self.told.append(kind.cancel)
            self.cancelled.set()
            found = kind.cancel in self.running
            if found and model.obeys:
                self.running[kind.cancel].set()
            yield reply(meta=Meta(cancelled=found), final=True)
            return
        elif isinstance(kind, Probe):
            model.probes += 1
            if model.probe is None:
                report = msgspec.structs.replace(model.report, begun=model.begun)
                yield reply(meta=Meta(probe=report), final=True)
                return
            script = model.probe
        else:
            others = {Tokenize: model.tokenize, Detokenize: model.tokenize, TokenizerFiles: model.send_files}
            script = others.get(type(kind), script)
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
        model.begun += isinstance(kind, Asked)
        responses = script(request, context)
        if isinstance(kind, Asked) and kind.request_id is not None:
            responses = self._cancellable(kind.request_id, responses)
        async for response in responses:
            yield response

    async def _cancellable(self, name: str, script: AsyncIterator[Response]) -> AsyncIterator[Response]:
        """Play a script until it is over, or the request is cancelled by its name."""
        cancelled = self.running[name] = asyncio.Event()
        told = asyncio.create_task(cancelled.wait())
        try:
            while True:
                step = asyncio.ensure_future(anext(script, None))
                try:
                    await asyncio.wait({step, told}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not step.done():
                        step.cancel()
                        await asyncio.gather(step, return_exceptions=True)
                if step.cancelled():
                    yield Response(error_message=refusal_text(RefusalCode.CANCELLED, "it was cancelled"))
                    return
                if (response := step.result()) is None:
                    return
                yield response
        finally:
            told.cancel()
            del self.running[name]

    async def _ready(self, name: str, context: Any) -> FakeModel:
        model = self.models.get(name)
        if model is None or model.state != "READY":
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' has no available versions"
            )
        assert model is not None
        return model


async def until(condition: Callable[..., bool], *, within_s: float = 60.0) -> None:
    """Wait for `condition()`, which may have defaults; the limit is only there to fail instead of hanging."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


def generation(**changes: Any) -> Generation:
    """A request with half a minute of time, not streamed; must be made inside the event loop."""
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "model": "m",
        "prompt": Conversation((Message(role="user", content="hi"),)),
        "deadline": asyncio.get_running_loop().time() + 30,
    }
    return Generation(**(fields | changes))


def infer_request() -> service_pb2.ModelInferRequest:
    """A request to `m`, of tensors that nobody reads."""
    request = service_pb2.ModelInferRequest(model_name="m", id="req-1")
    for name in ("prompt", "history", "sampling"):
        request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(pack_strings([b"{}"]))
    return request


def hanging(*responses: Response) -> Script:
    """An answer that stops after `responses` and waits to be cancelled."""

    async def answer(request: Any, context: Any) -> AsyncIterator[Response]:
        for response in responses:
            yield response
        await asyncio.Event().wait()

    return answer


def refusing(message: str, *responses: Response) -> Script:
    """A bare text, as Triton answers on an open stream, after `responses`."""

    async def answer(request: Any, context: Any) -> AsyncIterator[Response]:
        for response in responses:
            yield response
        yield Response(error_message=message)

    return answer


def losing(*responses: Response) -> Script:
    """An answer that breaks off as when the connection goes."""

    async def answer(request: Any, context: Any) -> AsyncIterator[Response]:
        for response in responses:
            yield response
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return answer
