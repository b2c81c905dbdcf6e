"""`POST /v1/chat/completions`."""

from fastapi import APIRouter
from starlette.responses import Response

from gateway.api.answering import AnsweringDep
from gateway.api.deps import InferenceKey, JsonBody, ReadingDep
from gateway.api.openapi import body_of, streamed_or_whole
from gateway.openai.chat_answer import ChatAnswer, ChatCompletion, ChatCompletionChunk
from gateway.openai.chat_request import ChatRequest, read_chat_request

router = APIRouter(dependencies=[InferenceKey])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    openapi_extra=body_of(ChatRequest),
    responses=streamed_or_whole(ChatCompletion, ChatCompletionChunk, done=True),
)
async def create_chat_completion(body: JsonBody, reading: ReadingDep, answering: AnsweringDep) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    asked = read_chat_request(body, reading)
    return await answering.respond(asked, ChatAnswer(asked))
