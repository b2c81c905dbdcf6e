"""The answer to a Responses request, whole and streamed."""

from collections.abc import AsyncIterator, Iterable

from gateway.errors import GatewayError
from gateway.generation import Accepted, Delta, Event
from gateway.openai.answer import encode
from gateway.openai.responses_course import ResponseCourse
from gateway.openai.responses_documents import ResponseDocument
from gateway.openai.responses_events import ResponseEvent, name_of
from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.sse import frame_named


class ResponsesAnswer:
    """Writes the answer to one request: see `gateway.openai.answer.Answer`."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._course = ResponseCourse(asked)

    async def whole(self, _accepted: Accepted, events: AsyncIterator[Event]) -> ResponseDocument:
        """Return the whole response."""
        async for event in events:
            if type(event) is Delta:
                self._course.take(event)
        self._course.end()
        return self._course.response

    def stream(self, _accepted: Accepted) -> "ResponseStream":
        """Return what writes the response as a stream."""
        return ResponseStream(self._course)


class ResponseStream:
    """Writes named events, the last of which has the response: see `gateway.openai.answer.StreamWriter`."""

    def __init__(self, course: ResponseCourse) -> None:
        self._course = course

    def begin(self) -> bytes:
        """Return the response before its first token."""
        return _frame(self._course.begin())

    def write(self, event: Event) -> bytes:
        """Return what `event` adds."""
        return _frame(self._course.take(event)) if type(event) is Delta else b""

    def close(self) -> bytes:
        """Return the whole response."""
        return _frame(self._course.end())

    def fail(self, error: GatewayError) -> bytes:
        """Return the error, and the response as far as it came."""
        return _frame(self._course.fail(error))


def _frame(events: Iterable[ResponseEvent]) -> bytes:
    return frame_named((name_of(event), encode(event)) for event in events)
