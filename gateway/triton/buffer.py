"""What has come of an answer, over its delta channel and on its own stream, and is to be read."""

import asyncio
from collections import deque
from collections.abc import Sequence

from gateway.triton.dialects.base import AnswerDelta, Response
from gateway.triton.errors import Fault, TritonError

BUFFER_LIMIT_BYTES = 2**20
"""Limit of what a client may leave unread, per choice: some ten thousand deltas. Beyond it the answer is
given up."""

_DELTA_BYTES = 100
"""Roughly the memory that a delta takes in addition to its text and its document."""

_RESPONSES_LIMIT = 8
"""Responses of a request's own stream that are read ahead: those with log-probabilities are large."""


class DeltaBuffer:
    """Joins an answer's two sources: deltas from a delta channel, and responses on the request's own stream.

    The generation takes both out at its client's pace. Deltas are put in without waiting, up to a limit, as
    the channel serves others, too; the reader of the own stream waits for room. Belongs to the event loop's
    thread; one task takes, any task may put. `now` is always of its clock, in seconds.
    """

    def __init__(self, numbers: range, now: float) -> None:
        self.numbers = numbers
        """Those of its choices on the channel, in order."""
        self.own: asyncio.Task[None] | None = None
        """Reads the own stream; cancelled beyond the limit, as the task that takes may be at its client's."""
        self.received = [0] * len(numbers)
        """Number of deltas received for each choice, whether taken or not."""
        self.deltas: list[AnswerDelta] = []
        """Those to be taken, in order."""
        self.responses: deque[Response] = deque()
        """Those of the request's own stream that are to be taken, in order."""
        self._ended = False
        self._limit_bytes = BUFFER_LIMIT_BYTES * len(numbers)
        self._bytes = 0
        self._heard = now
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """What the task that takes waits for, or last waited for."""
        self._room: asyncio.Future[None] | None = None
        """What the reader of the request's own stream waits for."""

    def put(
        self,
        number: int,
        text: str,
        tokens: int,
        document: bytes | None,
        now: float,
        *,
        ids: Sequence[int] = (),
    ) -> None:
        """Put in a choice's delta from the channel, which wakes the reader; ignored after a failure."""
        if self._error is not None:
            return
        index = number - self.numbers.start
        self.received[index] += 1
        self._heard = now
        self._bytes += _DELTA_BYTES + len(text) + (0 if document is None else len(document))
        self.deltas.append((index, text, tokens, ids, document))
        if self._bytes > self._limit_bytes:
            detail = f"over {self._limit_bytes} bytes of an answer were left unread"
            self.fail(TritonError(Fault.UNREAD, detail))
            if self.own is not None:
                self.own.cancel()

    async def put_response(self, response: Response, now: float) -> None:
        """Put in a response from the request's own stream, and wait until there is room for another."""
        self._heard = now
        self.responses.append(response)
        self.wake()
        if len(self.responses) >= _RESPONSES_LIMIT:
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None
                self._heard = asyncio.get_running_loop().time()

    def silent_s(self, now: float) -> float:
        """Return for how many seconds nothing has come; 0 while it is the client that is waited for."""
        return 0.0 if self._room is not None else now - self._heard

    def end(self) -> None:
        """Note that the request's own stream has ended."""
        self._ended = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the answer: whoever takes gets `error` after everything before it. The first error counts."""
        if self._error is None:
            self._error = error
            self.wake()

    def take_deltas(self) -> list[AnswerDelta]:
        """Return the deltas received since the last call, in order; perhaps none."""
        deltas, self.deltas = self.deltas, []
        self._bytes = 0
        return deltas

    def take_response(self) -> Response:
        """Return the next response of the request's own stream; there is one."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return self.responses.popleft()

    def check(self) -> None:
        """Raise the error with which the answer failed, if it did."""
        if self._error is not None:
            raise self._error

    async def more(self) -> bool:
        """Wait until something is put in; False if nothing will be. Call it only when everything was taken.

        Raises:
            TritonError: the answer failed.
        """
        if self._error is not None:  # not by `check`, and below not by `changed`: every token passes here
            raise self._error
        if self._ended:
            return False
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader
        return True

    async def changed(self) -> None:
        """Wait until something is put in, or `wake` is called.

        Raises:
            TritonError: the answer failed.
        """
        self.check()
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def wake(self) -> None:
        """Make the waiting task, if any, look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
