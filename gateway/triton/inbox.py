"""Where one answer's two sources meet: its deltas from a delta channel, and the request's own stream.

Both put things in without waiting; one generation takes them out, at its client's pace.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from tritonclient.grpc import service_pb2

from gateway.dialects.base import AnswerDelta
from gateway.triton.status import Fault, TritonError

LIMIT_BYTES = 2**20
"""About what may lie here unread of each choice, some ten thousand deltas of text; with more, the answer is
given up."""

_DELTA_BYTES = 100
"""Roughly what a delta takes in memory beside its text and its document."""


class Inbox:
    """Belongs to the event loop's thread; one task takes, anybody puts.

    Args:
        numbers: of its choices on the channel, in order.
        now: of the event loop's clock, in seconds.
        give_up: called when the limit is passed, since whoever takes may be stuck with its client.
    """

    def __init__(self, numbers: range, now: float, give_up: Callable[[], object]) -> None:
        self.numbers = numbers
        self._limit_bytes = LIMIT_BYTES * len(numbers)
        self._give_up = give_up
        self.heard = now
        """When something last came."""
        self.received = [0] * len(numbers)
        """Deltas that came of each choice, taken or not."""
        self._deltas: list[AnswerDelta] = []
        self._bytes = 0
        self._responses: deque[service_pb2.ModelInferResponse] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, text: str, tokens: int, document: bytes | None, now: float) -> None:
        """Take in a choice's delta from the channel; after a failure there is nobody to take it."""
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
        """Take in a response of the request's own stream."""
        self.heard = now
        self._responses.append(response)
        self.wake()

    def end(self) -> None:
        """Note that no response follows on the request's own stream."""
        self._ended = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the answer: whoever takes gets `error` after what came before it; the first one counts."""
        if self._error is None:
            self._error = error
            self.wake()

    def close(self) -> None:
        """Let go of who would be told to give up: the traceback of its end leads here."""
        self._give_up = _nobody

    def take_deltas(self) -> list[AnswerDelta]:
        """Return the deltas that came since the last call, in order; perhaps none."""
        deltas, self._deltas = self._deltas, []
        self._bytes = 0
        return deltas

    def take_response(self) -> service_pb2.ModelInferResponse | None:
        """Return the next response of the request's own stream, if there is one."""
        return self._responses.popleft() if self._responses else None

    async def more(self) -> bool:
        """Wait until something is put in; False when nothing comes any more. To be called when all is taken.

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
        """Let whoever waits look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nobody() -> None:
    """Nobody is left to give up."""
