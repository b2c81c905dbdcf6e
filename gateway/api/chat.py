"""`POST /v1/chat/completions`."""

import logging
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.deps import ExchangeDep, FlightDep, GatewayDep, InferenceKey, JsonBody
from gateway.api.openapi import body_of, streamed_or_whole
from gateway.errors import ClientGoneError, GatewayError, InternalError
from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.openai.chat_answer import (
    ChatCompletion,
    ChatCompletionChunk,
    ChunkWriter,
    Head,
    encode,
    whole_answer,
)
from gateway.openai.chat_request import ChatRequest, StreamOptions, read_chat_request
from gateway.openai.sse import DONE, EventStream, error_event, frame

router = APIRouter(dependencies=[InferenceKey])

_log = logging.getLogger(__name__)


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    openapi_extra=body_of(ChatRequest),
    responses=streamed_or_whole(ChatCompletion, ChatCompletionChunk),
)
async def create_chat_completion(
    request: Request, body: JsonBody, gateway: GatewayDep, exchange: ExchangeDep, flight: FlightDep
) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    asked = read_chat_request(body)
    gateway.upstream.model(asked.model)
    exchange.model = asked.model
    exchange.stream = bool(asked.stream)
    generation = asked.generation(request_id=exchange.request_id, deadline=exchange.deadline)
    accepted = await flight.start(generation, request.receive)
    head = Head.new(asked.model)
    if not asked.stream:
        answer = await whole_answer(head, flight, wants_logprobs=bool(asked.logprobs))
        return Response(encode(answer), media_type="application/json")
    await flight.stop_watching()  # the event stream does from here
    options = asked.stream_options or StreamOptions()
    writer = ChunkWriter(
        head,
        accepted,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
    )
    return EventStream(
        _events(flight, writer, exchange),
        on_gone=lambda: flight.end(ClientGoneError("The client hung up.")),
        ping_interval_s=gateway.settings.ping_interval_s,
        send_timeout_s=gateway.settings.send_timeout_s,
    )


async def _events(flight: Flight, writer: ChunkWriter, exchange: Exchange) -> AsyncIterator[bytes]:
    """Write the stream after its 200: chunks, or chunks and an error, and always the end mark."""
    try:
        async for event in flight:
            if chunks := writer.write(event):
                yield frame(chunks)
        last = frame(writer.close())
    except GatewayError as error:
        exchange.fail(error)
        last = error_event(error)
    except Exception:  # noqa: BLE001 - the stream's outermost frame: its client is owed an end
        _log.exception("a stream failed unexpectedly")
        failure = InternalError("The gateway failed; its log says why under this request's id.")
        exchange.fail(failure)
        last = error_event(failure)
    yield last + DONE
