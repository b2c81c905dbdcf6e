"""OpenAI's endpoints: each reads its body into a request, has it run, and writes the answer.

Dependencies are coroutines, though they await nothing: FastAPI would run plain functions in a thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from msgspec import Struct
from msgspec.structs import replace
from sse_starlette import ServerSentEvent
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway.anthropic.request import CountTokensRequest
from gateway.core.events import Accepted
from gateway.core.upstream import Embedding, ModelCard, Tokens, Vector
from gateway.errors import (
    ClientGoneError,
    ContextLengthError,
    GatewayError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedMediaTypeError,
)
from gateway.http.openapi import body_of, complete, streamed_or_complete
from gateway.http.record import Gateway, RequestRecord
from gateway.http.run import RunningRequest, check_limits
from gateway.http.sites import name_of
from gateway.http.sse import PING, EventStream
from gateway.limits.admission import Admission
from gateway.openai.answer import Answer, encode
from gateway.openai.chat_answer import ChatAnswer, ChatCompletion, ChatCompletionChunk
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import Completion, CompletionAnswer, CompletionChunk, CompletionRequest
from gateway.openai.document import Body, Reading, named_model
from gateway.openai.embeddings import EmbeddingsAnswer, EmbeddingsRequest, embeddings_answer
from gateway.openai.params import GenerationRequest
from gateway.openai.responses_answer import ResponseDocument, ResponsesAnswer, StreamEvent
from gateway.openai.responses_request import InputTokensRequest, ResponsesRequest
from gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.settings import Settings
from gateway.settings.values import Scope, is_local, is_loopback

_EMBEDDED_AT_ONCE = 32
"""Texts of one request: enough to fill a batch, and not everybody's places."""


async def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def _record(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


GatewayDep = Annotated[Gateway, Depends(_gateway)]
RecordDep = Annotated[RequestRecord, Depends(_record)]


async def _inference(request: Request, gateway: GatewayDep, record: RecordDep) -> None:
    record.key_name = gateway.keyring.authorize(request.headers, Scope.INFERENCE)


def _for_metrics_alone(request: Request, settings: Settings) -> bool:
    """Whether a request came in by `metrics_address`."""
    address, server = settings.metrics_address, request.scope.get("server")
    return address is not None and server is not None and address.rpartition(":")[2] == str(server[1])


def _from_here(request: Request, gateway: Gateway) -> bool:
    """Whether a request comes from this machine, and not through a proxy that tells of itself.

    nginx's proxy_pass by default tells no more than HTTP/1.0.
    """
    local = is_loopback(name_of(request.headers.get("host", ""))) and request.scope["http_version"] != "1.0"
    return local and gateway.from_here(request.headers)


async def _metrics(request: Request, gateway: GatewayDep, record: RecordDep) -> None:
    settings = gateway.settings
    if _for_metrics_alone(request, settings):
        return
    if settings.metrics_need_key or not _from_here(request, gateway):
        record.key_name = gateway.keyring.authorize(request.headers, Scope.METRICS)


async def _admin(request: Request, gateway: GatewayDep, record: RecordDep) -> None:
    record.key_name = gateway.authorize_admin(request.headers)
    if record.key_name is not None:
        return
    if not is_loopback(name_of(request.headers.get("host", ""))):
        raise PermissionDeniedError("Without keys, this request must be addressed to a loopback name.")
    if request.scope["http_version"] == "1.0":  # as nginx's proxy_pass speaks, which by default tells no more
        raise PermissionDeniedError("Without keys, this request must be sent by HTTP/1.1.")


async def _site(request: Request, gateway: GatewayDep) -> None:
    headers, settings = request.headers, gateway.settings
    if _for_metrics_alone(request, settings):
        if request.scope["path"] != "/metrics":
            raise NotFoundError("There is nothing at this path: this port has /metrics alone.")
        if not is_local(settings.metrics_address or ""):
            return  # whoever is on its network may read it, by whatever name
    gateway.sites.check(request.method, headers.get("host", ""), headers.get("origin"))


InferenceKey = Depends(_inference)
"""For routers: the caller needs a key with the scope `inference`."""

AdminKey = Depends(_admin)
"""For routers: the caller needs a key with the scope `admin`; if there are no keys, everybody has it."""

OwnSite = Depends(_site)
"""For every route: web pages of other sites are kept out."""

MetricsKey = Depends(_metrics)
"""For `/metrics`: beyond loopback, the caller needs a key with the scope `metrics`, if there are keys."""


async def read_body(request: Request, gateway: GatewayDep, record: RecordDep) -> bytes:
    """Read the whole body, of whatever type.

    Raises:
        ClientGoneError: the client hung up before its end.
        GatewayError: it exceeds a limit.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError("The client hung up while it sent its body.") from None
    gateway.bodies.keep(body, record.resources)
    if gateway.settings.log_prompts:
        record.body = body
    return body


async def read_json(request: Request, gateway: Gateway, record: RequestRecord, admission: Admission) -> bytes:
    """Read a body of JSON, if `admission` has a place for its request.

    Raises:
        UnsupportedMediaTypeError: it is declared as something else.
        GatewayError: as `check_limits` and `read_body`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError("The body must be declared as Content-Type: application/json.")
    check_limits(gateway, record, admission)
    return await read_body(request, gateway, record)


def only_model(gateway: Gateway, record: RequestRecord) -> str | None:
    """Return the name of the one model that the caller may use; None: there are several, or none."""
    served = gateway.models(record.key_name)
    return served[0].id if len(served) == 1 else None


def reading_of(body: bytes, gateway: Gateway, record: RequestRecord) -> Reading:
    """Return how `body` is read; what it ignores, the answer names.

    Its model is looked up here: perhaps it is read on another thread (`Bodies.read`).
    """
    named = named_model(body)
    name = only_model(gateway, record) if named is None else named
    try:
        known = None if name is None else gateway.model(name, record.key_name)
    except GatewayError:  # which the request gets where it needs the model
        known = None
    return Reading(
        strict=gateway.settings.strict,
        model=name,
        reads=frozenset() if known is None else known.template_reads,
        defaults={} if known is None else known.settings.defaults.of_requests(),
        ignored=record.ignored,
    )


OptionalBody = Annotated[bytes, Depends(read_body)]
"""Of whatever content type; perhaps empty."""


B = TypeVar("B", bound=Body)


class Answering:
    """Reads one request, runs and answers it."""

    def __init__(self, request: Request, gateway: GatewayDep, record: RecordDep) -> None:
        self._request = request
        self._gateway = gateway
        self._record = record
        self._running = RunningRequest(gateway, record)

    async def read(self, kind: type[B], *, tokenizes: bool = False) -> B:
        """Read the body, see `Body.read`; while a large one is read, others are served.

        `tokenizes`: it is for a tokenizer, not for an engine: its place is among those requests.
        """
        gateway, record = self._gateway, self._record
        admission = gateway.tokenizing if tokenizes else gateway.admission
        body = await read_json(self._request, gateway, record, admission)
        await self._running.reached(self._request.receive)
        return await gateway.bodies.read(body, partial(kind.read, body, reading_of(body, gateway, record)))

    async def respond(
        self, request: GenerationRequest, answer: Answer, ping: ServerSentEvent = PING
    ) -> Response:
        """Return the answer to `request`, as `answer` writes it; `ping` keeps its stream open.

        Raises:
            GatewayError: before the first byte; later errors become part of the stream.
        """
        record, running, settings = self._record, self._running, self._gateway.settings
        card = self._gateway.model(request.model, record.key_name)
        limits = card.settings.limits
        record.model = card.id
        record.stream = bool(request.stream)
        record.include_timings = bool(request.include_timings)
        of_gateway = settings.max_choices  # also where the two are equal: it sorts first
        request.check_choices(*min((of_gateway, "this gateway"), (limits.n or of_gateway, "this model")))
        request.check_bound(limits.max_tokens)
        generations = request.generations(request_id=record.request_id, deadline=record.deadline)
        # A stream that waits for long, for a place or for its model to be loaded, begins with pings.
        patience_s = settings.ping_interval_s if request.stream else None
        with _naming(request.subject, ContextLengthError, request.bound_field):
            accepted = await running.start(generations, self._request.receive, patience_s=patience_s)
        if accepted is not None and not request.stream:
            return respond_with(await answer.accept(accepted).complete(running))
        await running.stop_watching()  # from here on the event stream watches
        return EventStream(
            _events(running, answer, accepted, record, request=request),
            on_gone=lambda: running.end(ClientGoneError("The client hung up.")),
            ping_interval_s=settings.ping_interval_s,
            send_timeout_s=settings.send_timeout_s,
            send_body=record.send_body,
            ping=ping,
        )

    async def tokens(
        self, request: TokenizeRequest | DetokenizeRequest | CountTokensRequest | InputTokensRequest
    ) -> Tokens:
        """Return what the tokenizer of `request`'s model makes of it.

        Raises:
            GatewayError: it failed; `param` names a field of `request`.
        """
        record, gateway = self._record, self._gateway
        record.model = gateway.model(request.model, record.key_name).id
        work = request.tokenization(request_id=record.request_id, deadline=record.deadline)
        with _naming(request.subject, InvalidRequestError):
            return await self._running.call(
                lambda: gateway.upstream.tokenize(work), self._request.receive, admission=gateway.tokenizing
            )

    async def vectors(self, request: EmbeddingsRequest) -> list[Vector]:
        """Return the vectors of `request`'s inputs, in order, of which a few are computed at a time.

        Raises:
            GatewayError: one failed.
        """
        record, gateway = self._record, self._gateway
        record.model = gateway.model(request.model, record.key_name).id
        work = request.embeddings(request_id=record.request_id, deadline=record.deadline)
        free = asyncio.Semaphore(_EMBEDDED_AT_ONCE)

        async def one(each: Embedding) -> Vector:
            async with free:
                return await gateway.upstream.embed(each)

        async def every() -> list[Vector]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(each)) for each in work]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks]

        vectors = await self._running.call(every, self._request.receive)
        record.observe(Accepted(prompt_tokens=sum(vector.tokens for vector in vectors)))
        return vectors


async def _answering(request: Request, gateway: GatewayDep, record: RecordDep) -> Answering:
    return Answering(request, gateway, record)


AnsweringDep = Annotated[Answering, Depends(_answering)]


@contextmanager
def _naming(subject: str, kind: type[InvalidRequestError], bound: str = "max_tokens") -> Iterator[None]:
    """Have errors of this kind that name no field of the request name `subject`, and its limit `bound`."""
    try:
        yield
    except kind as error:
        message = error.message.replace(" max_tokens.", f" {bound}.")  # as models say
        raise type(error)(message, param=error.param or subject, reason=error.reason) from None


async def _events(
    running: RunningRequest,
    answer: Answer,
    accepted: Accepted | None,
    record: RequestRecord,
    *,
    request: GenerationRequest,
) -> AsyncGenerator[bytes, None]:
    """Write the stream, and always its end: status 200 was sent already, perhaps before the acceptance."""
    try:
        with _naming(request.subject, ContextLengthError, request.bound_field):
            answer.accept(accepted or await running.accepted())
        if written := answer.begin():
            yield written
        async for event in running:
            if written := answer.write(event):
                yield written
        last = answer.close()
    except GatewayError as error:
        record.fail(error)
        last = answer.fail(error)
    except Exception:  # noqa: BLE001 - the stream's outermost frame: the client must get an end
        last = answer.fail(record.fail_unexpectedly())
    yield last


def respond_with(document: Struct) -> Response:
    """Return `document` as JSON."""
    return Response(encode(document), media_type="application/json")


def new_router(*dependencies: Any, **options: Any) -> APIRouter:
    """Return a router for an app, which takes its routes as they are; each asks for its own site first.

    Had the app included the router, FastAPI would make all its routes anew at the first request, and look
    for each request's route twice.
    """
    return APIRouter(dependencies=[OwnSite, *dependencies], **options)


router = new_router(InferenceKey, default_response_class=Response)


_ANTHROPIC = "anthropic-version"
"""A header that every client of Anthropic's API sends."""


class Model(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A served model. `max_model_len` (in tokens), `ready` and `unloaded` are our extensions.

    `parent` is the model that an adapter is applied to, as in vLLM; `root` is the public name of an alias.
    What `type` and those behind it say is for clients of Anthropic's API.
    """

    id: str
    object: str
    created: int
    owned_by: str
    ready: bool
    max_model_len: int | None = None
    unloaded: bool = False
    parent: str | None = None
    root: str | None = None
    type: str | None = None
    display_name: str | None = None
    created_at: str | None = None
    lifecycle: str | None = None
    max_input_tokens: int | None = None

    @classmethod
    def of(cls, card: ModelCard, name: str, request: Request | None = None) -> "Model":
        """Return what clients are told of a model that they call `name`; Anthropic's in their words, too."""
        model = cls(
            id=name,
            root=None if name == card.id else card.id,
            object="model",
            created=card.created,
            owned_by="tritongate",
            ready=card.ready,
            max_model_len=card.max_context,
            unloaded=card.unloaded,
            parent=card.parent,
        )
        if request is None or _ANTHROPIC not in request.headers:
            return model
        created_at = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return replace(
            model,
            type="model",
            display_name=name,
            created_at=created_at,
            lifecycle="active",
            max_input_tokens=card.max_context,
        )


class ModelList(Struct, frozen=True, omit_defaults=True):
    """All served models."""

    object: str
    data: list[Model]
    has_more: bool | None = None
    first_id: str | None = None
    last_id: str | None = None


@router.get("/v1/models", responses=complete(ModelList))
async def list_models(request: Request, gateway: GatewayDep, record: RecordDep) -> Response:
    """List the models that the caller may use, ready or not, by all their names."""
    cards = gateway.models(record.key_name)
    listed = [Model.of(card, name, request) for card in cards for name in (card.id, *card.settings.aliases)]
    if _ANTHROPIC not in request.headers or not listed:
        return respond_with(ModelList("list", listed))
    return respond_with(
        ModelList("list", listed, has_more=False, first_id=listed[0].id, last_id=listed[-1].id)
    )


@router.get("/v1/models/{model_id:path}", responses=complete(Model))
async def get_model(model_id: str, request: Request, gateway: GatewayDep, record: RecordDep) -> Response:
    """Describe one model; ids may hold slashes."""
    return respond_with(Model.of(gateway.model(model_id, record.key_name), model_id, request))


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(ChatRequest),
    responses=streamed_or_complete(ChatCompletion, ChatCompletionChunk, done=True),
)
async def create_chat_completion(answering: AnsweringDep) -> Response:
    """Answer a conversation, at once or as a stream of events."""
    request = await answering.read(ChatRequest)
    return await answering.respond(request, ChatAnswer(request))


@router.post(
    "/v1/completions",
    openapi_extra=body_of(CompletionRequest),
    responses=streamed_or_complete(Completion, CompletionChunk, done=True),
)
async def create_completion(answering: AnsweringDep) -> Response:
    """Continue a text, or token ids, at once or as a stream of events."""
    request = await answering.read(CompletionRequest)
    return await answering.respond(request, CompletionAnswer(request))


@router.post(
    "/v1/responses",
    openapi_extra=body_of(ResponsesRequest),
    responses=streamed_or_complete(ResponseDocument, StreamEvent),
)
async def create_response(answering: AnsweringDep) -> Response:
    """Answer a conversation, at once or as a stream of named events. Nothing is stored."""
    request = await answering.read(ResponsesRequest)
    return await answering.respond(request, ResponsesAnswer(request))


@router.post(
    "/v1/embeddings",
    openapi_extra=body_of(EmbeddingsRequest),
    responses=complete(EmbeddingsAnswer),
)
async def create_embeddings(answering: AnsweringDep) -> Response:
    """Return the vectors of texts."""
    request = await answering.read(EmbeddingsRequest)
    return respond_with(embeddings_answer(request, await answering.vectors(request)))
