"""Serves `/v1/messages`: Anthropic's Messages API, run as every other request is."""

from sse_starlette import ServerSentEvent
from starlette.responses import Response

from gateway.anthropic.answer import PING, MessageDocument, MessagesAnswer, MessagesEvent, TokensCount
from gateway.anthropic.errors import MessagesError
from gateway.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.http.openapi import body_of, complete, streamed_or_complete
from gateway.http.routes import AnsweringDep, InferenceKey, RecordDep, new_router, respond_with

_PING = ServerSentEvent(event=PING[0], data=PING[1], sep="\n")


router = new_router(InferenceKey, default_response_class=Response)


@router.post(
    "/v1/messages",
    openapi_extra=body_of(MessagesRequest),
    responses=streamed_or_complete(MessageDocument, MessagesEvent, error=MessagesError),
)
async def create_message(record: RecordDep, answering: AnsweringDep) -> Response:
    """Answer a conversation in Anthropic's format, at once or as a stream of named events."""
    request = await answering.read(MessagesRequest)
    return await answering.respond(request, MessagesAnswer(request, record.request_id), ping=_PING)


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=body_of(CountTokensRequest),
    responses=complete(TokensCount, error=MessagesError),
)
async def count_tokens(answering: AnsweringDep) -> Response:
    """Count the tokens of a conversation as the model would be given it."""
    tokens = await answering.tokens(await answering.read(CountTokensRequest, tokenizes=True))
    return respond_with(TokensCount(len(tokens.ids)))
