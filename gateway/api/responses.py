"""`POST /v1/responses`."""

from fastapi import APIRouter
from starlette.responses import Response

from gateway.api.answering import AnsweringDep
from gateway.api.deps import InferenceKey, JsonBody, ReadingDep
from gateway.api.openapi import body_of, streamed_or_whole
from gateway.openai.responses_answer import ResponsesAnswer
from gateway.openai.responses_documents import ResponseDocument
from gateway.openai.responses_events import StreamEvent
from gateway.openai.responses_request import ResponsesRequest, read_responses_request

router = APIRouter(dependencies=[InferenceKey])


@router.post(
    "/v1/responses",
    response_class=Response,
    openapi_extra=body_of(ResponsesRequest),
    responses=streamed_or_whole(ResponseDocument, StreamEvent),
)
async def create_response(body: JsonBody, reading: ReadingDep, answering: AnsweringDep) -> Response:
    """Answer a conversation, whole or as a stream of named events. Nothing is stored."""
    asked = read_responses_request(body, reading)
    return await answering.respond(asked, ResponsesAnswer(asked))
