"""`POST /v1/completions`."""

from fastapi import APIRouter
from starlette.responses import Response

from gateway.api.answering import AnsweringDep
from gateway.api.deps import InferenceKey, JsonBody, ReadingDep
from gateway.api.openapi import body_of, streamed_or_whole
from gateway.openai.completion_answer import Completion, CompletionAnswer, CompletionChunk
from gateway.openai.completion_request import CompletionRequest, read_completion_request

router = APIRouter(dependencies=[InferenceKey])


@router.post(
    "/v1/completions",
    response_class=Response,
    openapi_extra=body_of(CompletionRequest),
    responses=streamed_or_whole(Completion, CompletionChunk, done=True),
)
async def create_completion(body: JsonBody, reading: ReadingDep, answering: AnsweringDep) -> Response:
    """Continue a text, or token ids, whole or as a stream of events."""
    asked = read_completion_request(body, reading)
    return await answering.respond(asked, CompletionAnswer(asked))
