"""The results of one message's tool calls, as a conversation brings them."""

from collections.abc import Sequence

from gateway.errors import InvalidRequestError
from gateway.generation import Message, PastCall
from wire.history import Turn


class ToolResults:
    """Collects the results of the calls that the message at `at` made, one for each.

    Args:
        at: the message's place in the request.
        calls: what it called.
    """

    def __init__(self, at: int = 0, calls: Sequence[PastCall] = ()) -> None:
        self._at = at
        self._calls = calls
        self._contents: dict[str, str] = {}

    def add(self, at: int, message: Message) -> None:
        """Take the tool message at `at`.

        Raises:
            InvalidRequestError: it answers none of the calls, or one that was answered.
        """
        if message.answers in self._contents:
            raise InvalidRequestError("this call was answered before", param=f"messages.{at}")
        if message.answers is None or message.answers not in [call.id for call in self._calls]:
            raise InvalidRequestError(
                "a tool message must answer a tool call of the assistant message before it",
                param=f"messages.{at}",
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
                param=f"messages.{self._at}",
            )
        return [Turn("observation", self._contents[call.id]) for call in self._calls]
