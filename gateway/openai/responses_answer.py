"""The answer to a Responses request, whole or streamed."""

from collections.abc import AsyncIterator, Iterable

from gateway.errors import GatewayError
from gateway.generation import Accepted, Delta, Event
from gateway.openai.answer import encode
from gateway.openai.response_builder import ResponseBuilder
from gateway.openai.responses_documents import ResponseDocument
from gateway.openai.responses_events import ResponseEvent, name_of
from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.sse import frame_named


class ResponsesAnswer:
    """Writes the answer to one request: see `gateway.openai.answer.Answer`."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._builder = ResponseBuilder(asked)

    async def whole(self, _accepted: Accepted, events: AsyncIterator[Event]) -> ResponseDocument:
        """Return the whole response."""
        async for event in events:
            if type(event) is Delta:
                self._builder.take(event)
        self._builder.end()
        return self._builder.response

    def stream(self, _accepted: Accepted) -> "ResponseStream":
        """Return a writer that streams the response."""
        return ResponseStream(self._builder)


class ResponseStream:
    """A `StreamWriter` (see `gateway.openai.answer`) of named events, the last of which has the response."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder

    def begin(self) -> bytes:
        """Return the events before the first token."""
        return _frame(self._builder.begin())

    def write(self, event: Event) -> bytes:
        """Return what `event` adds."""
        return _frame(self._builder.take(event)) if type(event) is Delta else b""

    def close(self) -> bytes:
        """Return the whole response."""
        return _frame(self._builder.end())

    def fail(self, error: GatewayError) -> bytes:
        """Return the error, and the response so far."""
        return _frame(self._builder.fail(error))


def _frame(events: Iterable[ResponseEvent]) -> bytes:
    return frame_named((name_of(event), encode(event)) for event in events)
