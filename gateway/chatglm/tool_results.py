"""The results of one message's tool calls, put into the order of the calls."""

from gateway.errors import InvalidRequestError
from gateway.generation import Message
from wire.history import Turn


class ToolResults:
    """Collects one result for each call of an assistant message.

    Args:
        message: the one with the calls; None: there is none.
    """

    def __init__(self, message: Message | None = None) -> None:
        self._field = "" if message is None else message.field
        self._calls = () if message is None else message.calls
        self._ids = frozenset(call.id for call in self._calls)
        self._contents: dict[str, str] = {}

    def add(self, message: Message) -> None:
        """Take a tool message.

        Raises:
            InvalidRequestError: it answers none of the calls, or one that was answered already.
        """
        if message.answers in self._contents:
            raise InvalidRequestError("this call was answered before", param=message.field)
        if message.answers is None or message.answers not in self._ids:
            raise InvalidRequestError(
                "a tool message must answer a tool call of the assistant message before it",
                param=message.field,
            )
        self._contents[message.answers] = message.content

    def turns(self) -> list[Turn]:
        """Return the observations, in the order of the calls.

        Raises:
            InvalidRequestError: a call has no result.
        """
        missing = [call.id for call in self._calls if call.id not in self._contents]
        if missing:
            raise InvalidRequestError(
                "an assistant message that calls tools must be followed by a tool message for each call",
                param=self._field,
            )
        return [Turn("observation", self._contents[call.id]) for call in self._calls]
