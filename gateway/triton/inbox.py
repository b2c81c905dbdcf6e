"""Joins an answer's two sources: deltas from a delta channel, and responses on the request's own stream.

Both are put in without waiting; the generation takes them out at its client's pace.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from tritonclient.grpc import service_pb2

from gateway.dialects.base import AnswerDelta
from gateway.triton.status import Fault, TritonError

LIMIT_BYTES = 2**20
"""Limit of what may lie here unread, per choice: some ten thousand deltas. Beyond it the answer is given
up."""

_DELTA_BYTES = 100
"""Roughly the memory that a delta takes in addition to its text and its document."""


class Inbox:
    """Belongs to the event loop's thread; one task takes, any task may put.

    Args:
        numbers: the numbers of its choices on the channel, in order.
        now: the time on the event loop's clock, in seconds.
        give_up: called when the limit is exceeded, because the task that takes may be waiting for its client.
    """

    def __init__(self, numbers: range, now: float, give_up: Callable[[], object]) -> None:
        self.numbers = numbers
        self._limit_bytes = LIMIT_BYTES * len(numbers)
        self._give_up = give_up
        self.heard = now
        """When something was last put in."""
        self.received = [0] * len(numbers)
        """Number of deltas received for each choice, whether taken or not."""
        self._deltas: list[AnswerDelta] = []
        self._bytes = 0
        self._responses: deque[service_pb2.ModelInferResponse] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, text: str, tokens: int, document: bytes | None, now: float) -> None:
        """Put in a choice's delta from the channel; ignored after a failure, when nobody would take it."""
        if self._error is not None:
            return
        index = number - self.numbers.start
        self.received[index] += 1
        self.heard = now
        self._bytes += _DELTA_BYTES + len(text) + (0 if document is None else len(document))
        self._deltas.append((index, text, tokens, document))
        if self._bytes > self._limit_bytes:
            detail = f"over {self._limit_bytes} bytes of an answer were left unread"
            self.fail(TritonError(Fault.UNREAD, detail))
            self._give_up()
        self.wake()

    def put_response(self, response: service_pb2.ModelInferResponse, now: float) -> None:
        """Put in a response from the request's own stream."""
        self.heard = now
        self._responses.append(response)
        self.wake()

    def end(self) -> None:
        """Note that the request's own stream has ended."""
        self._ended = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the answer: whoever takes gets `error` after everything before it. The first error counts."""
        if self._error is None:
            self._error = error
            self.wake()

    def close(self) -> None:
        """Drop the reference to `give_up`: the traceback of its task's end refers back to this object."""
        self._give_up = _nobody

    def take_deltas(self) -> list[AnswerDelta]:
        """Return the deltas received since the last call, in order; perhaps none."""
        deltas, self._deltas = self._deltas, []
        self._bytes = 0
        return deltas

    def take_response(self) -> service_pb2.ModelInferResponse | None:
        """Return the next response of the request's own stream, if there is one."""
        return self._responses.popleft() if self._responses else None

    async def more(self) -> bool:
        """Wait until something is put in; False if nothing will be. Call it only when everything was taken.

        Raises:
            TritonError: the answer failed.
        """
        if self._ended and self._error is None:
            return False
        await self.changed()
        return True

    async def changed(self) -> None:
        """Wait until something is put in, or `wake` is called.

        Raises:
            TritonError: the answer failed.
        """
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Make the waiting task, if any, look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nobody() -> None:
    """Nobody is left to give up."""
