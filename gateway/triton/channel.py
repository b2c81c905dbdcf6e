"""One backend's delta channel: kept open while its model serves, and opened anew after a loss.

Reads the frames and puts each delta into its generation's buffer. When the channel ends, so does every
generation on it: none waits for a channel that is gone. Knows neither prompts nor why a backend is chosen.

    closed ──model ready──▶ opening ──frame 0──▶ open ──retired and idle──▶ closed
                               ▲                  │
                               └──after a pause───┴─lost
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator

from tritonclient.grpc import service_pb2

from gateway.dialects.base import AnswerDelta, ChannelDialect
from gateway.errors import UpstreamProtocolError
from gateway.triton.backoff import Backoff
from gateway.triton.client import Client
from gateway.triton.errors import Fault, TritonError
from wire.channel import Frame

_log = logging.getLogger(__name__)

OPEN_WAIT_S = 2.0
"""How long a generation waits for the channel to open before its backend counts as unavailable."""

BUFFER_LIMIT_BYTES = 2**20
"""Limit of what a client may leave unread, per choice: some ten thousand deltas. Beyond it the answer is
given up."""

_DELTA_BYTES = 100
"""Roughly the memory that a delta takes in addition to its text and its document."""

_RESPONSES_LIMIT = 8
"""Responses of a request's own stream that are read ahead: those with log-probabilities are large."""

_STEADY_S = 5.0
"""The loss of a channel that was open for longer does not count as another failed attempt."""

_KEPT_FAULTS = {Fault.CLOSED, Fault.STUB_DEAD}
"""Faults passed on as they are, because they say more than `CHANNEL_LOST`."""


class DeltaChannel:
    """The channel to `model` on the Triton of `client`.

    Args:
        model: its id.
        client: of the Triton.
        idle_timeout_s: after so many seconds without a frame the channel counts as lost; after so many
            without anything for a generation, that generation fails.
        backoff: the pauses before it is opened again after a loss.
    """

    def __init__(self, model: str, client: Client, *, idle_timeout_s: float, backoff: Backoff) -> None:
        self._model = model
        self._client = client
        self._idle_timeout_s = idle_timeout_s
        self._backoff = backoff
        self._loop = asyncio.get_running_loop()
        self._dialect: ChannelDialect | None = None
        self._next_number = 0
        self._buffers: dict[int, DeltaBuffer] = {}
        self._finishing: dict[DeltaBuffer, int] = {}
        self._task: asyncio.Task[None] | None = None
        """Opens and reads the channel, perhaps after a pause; None: it is closed and stays so."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._opened_at = 0.0
        self._failing = False
        """Whether the latest attempt to open it has failed."""
        self._retired = False
        self._next_check = 0.0
        self.id = ""
        """The id of the channel that is open now, new at each opening."""
        self.last_frame = -1
        """Number of the newest frame received."""

    @property
    def is_open(self) -> bool:
        """Whether generations can name it."""
        return self._open.is_set()

    def start(self, dialect: ChannelDialect) -> None:
        """Open the channel, and open it again whenever it is lost, until it is retired or closed."""
        self._dialect = dialect
        self._retired = False
        if self._task is None:
            self._begin(dialect, pause_s=0.0)

    async def opened(self) -> None:
        """Wait a moment until the channel is open.

        Raises:
            TritonError: it is not; `NO_CHANNEL`.
        """
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                await self._open.wait()
        except TimeoutError:
            raise TritonError(Fault.NO_CHANNEL, f"not open within {OPEN_WAIT_S} s") from None

    def next_numbers(self, count: int) -> range:
        """Return numbers for a generation's choices that no other generation has on this channel."""
        first = self._next_number
        self._next_number += count
        return range(first, self._next_number)

    @contextlib.contextmanager
    def deliver(self, buffer: "DeltaBuffer") -> Iterator[None]:
        """During the block, put deltas with the buffer's numbers into `buffer`."""
        self._buffers |= dict.fromkeys(buffer.numbers, buffer)
        try:
            yield
        finally:
            for number in buffer.numbers:
                del self._buffers[number]
            self._finishing.pop(buffer, None)
            self._close_if_retired()

    def wake_after(self, frame: int, buffer: "DeltaBuffer") -> None:
        """Wake the reader of `buffer` once frame `frame` was received."""
        self._finishing[buffer] = frame

    def lose(self, channel_id: str, error: TritonError) -> None:
        """Give up the channel if it still has this id: the model says that it is not open."""
        if channel_id == self.id and self.is_open:
            self._lost(error)

    def retire(self) -> None:
        """Close it as soon as no generation uses it: an open channel keeps its model from being unloaded."""
        self._retired = True
        self._close_if_retired()

    async def close(self) -> None:
        """Close it now, for good."""
        self._retired = True
        self._end(TritonError(Fault.CLOSED, "the pool was closed"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _close_if_retired(self) -> None:
        if self._retired and not self._buffers:
            self._end(TritonError(Fault.CHANNEL_LOST, "the channel was closed"))

    def _begin(self, dialect: ChannelDialect, *, pause_s: float) -> None:
        self._task = asyncio.create_task(
            self._keep(dialect, pause_s),
            name=f"delta channel of {self._model}",
            context=contextvars.Context(),  # not the context of a request that found it lost
        )
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    async def _keep(self, dialect: ChannelDialect, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        try:
            await self._read(dialect)
        except TritonError as error:
            self._lost(error)
        except UpstreamProtocolError as error:
            self._lost(TritonError(Fault.PROTOCOL, error.message))
        except Exception as error:  # noqa: BLE001 - the task's outermost frame: whoever waits must be told
            _log.exception("the delta channel failed", extra=self._extra())
            self._lost(TritonError(Fault.INTERNAL, f"the gateway failed: {type(error).__name__}"))

    def _lost(self, error: TritonError) -> None:
        """Record a loss: generations on the channel end, and it is opened again after a pause."""
        if self.is_open or not self._failing:
            what = "delta channel lost" if self.is_open else "delta channel cannot be opened"
            _log.warning(what, extra=self._extra() | {"detail": error.detail})
        if self.is_open and self._loop.time() - self._opened_at > _STEADY_S:
            self._backoff.reset()
        self._failing = not self.is_open
        known = error.fault in _KEPT_FAULTS
        self._end(error if known else TritonError(Fault.CHANNEL_LOST, error.detail))
        if self._dialect is not None and not self._retired:
            self._begin(self._dialect, pause_s=self._backoff.next())

    def _end(self, error: TritonError) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._open.clear()
        for buffer in self._buffers.values():
            buffer.fail(error)

    async def _read(self, dialect: ChannelDialect) -> None:
        self.id = secrets.token_hex(16)
        self.last_frame = -1
        responses = self._client.stream_infer(
            dialect.open_channel(self._model, self.id), deadline=math.inf, idle_timeout_s=self._idle_timeout_s
        )
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._take(dialect.read_frame(response))
        raise TritonError(Fault.CHANNEL_LOST, "the model closed the channel")

    def _take(self, frame: Frame) -> None:
        if frame.frame != self.last_frame + 1:
            raise TritonError(Fault.CHANNEL_LOST, f"frame {frame.frame} came after {self.last_frame}")
        self.last_frame = frame.frame
        now = self._loop.time()
        buffers, metas = self._buffers, frame.metas
        for place, (stream, text, tokens) in enumerate(
            zip(frame.streams, frame.texts, frame.tokens, strict=True)
        ):
            buffer = buffers.get(stream)
            if buffer is not None:  # None if its client has left
                document = metas.get(place) if metas else None
                buffer.put(stream, text, tokens, None if document is None else bytes(document), now)
        for buffer, number in self._finishing.items():
            if number <= frame.frame:
                buffer.wake()
        if not self.is_open:
            self._opened_at = now
            self._open.set()
        if now >= self._next_check:
            self._give_up_silent(now)

    def _give_up_silent(self, now: float) -> None:
        """End generations for which nothing has come for too long; checked four times per timeout."""
        self._next_check = now + self._idle_timeout_s / 4
        for buffer in self._buffers.values():
            if buffer.silent_s(now) > self._idle_timeout_s:
                buffer.fail(TritonError(Fault.SILENT, f"no response within {self._idle_timeout_s} s"))

    def _extra(self) -> dict[str, str]:
        return {"model": self._model, "upstream": self._client.address}


class DeltaBuffer:
    """Joins an answer's two sources: deltas from a delta channel, and responses on the request's own stream.

    The generation takes both out at its client's pace. Deltas are put in without waiting, up to a limit, as
    the channel serves others, too; the reader of the own stream waits for room. Belongs to the event loop's
    thread; one task takes, any task may put.

    Args:
        numbers: the numbers of its choices on the channel, in order.
        now: the time on the event loop's clock, in seconds.
        give_up: called when the limit is exceeded, because the task that takes may be waiting for its client.
    """

    def __init__(self, numbers: range, now: float, give_up: Callable[[], object]) -> None:
        self.numbers = numbers
        self._limit_bytes = BUFFER_LIMIT_BYTES * len(numbers)
        self._give_up = give_up
        self._heard = now
        self.received = [0] * len(numbers)
        """Number of deltas received for each choice, whether taken or not."""
        self._deltas: list[AnswerDelta] = []
        self._bytes = 0
        self._responses: deque[service_pb2.ModelInferResponse] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """What the task that takes waits for, or last waited for."""
        self._room: asyncio.Future[None] | None = None
        """What the reader of the request's own stream waits for."""

    def put(self, number: int, text: str, tokens: int, document: bytes | None, now: float) -> None:
        """Put in a choice's delta from the channel; ignored after a failure, when nobody would take it."""
        if self._error is not None:
            return
        index = number - self.numbers.start
        self.received[index] += 1
        self._heard = now
        self._bytes += _DELTA_BYTES + len(text) + (0 if document is None else len(document))
        self._deltas.append((index, text, tokens, document))
        if self._bytes > self._limit_bytes:
            detail = f"over {self._limit_bytes} bytes of an answer were left unread"
            self.fail(TritonError(Fault.UNREAD, detail))
            self._give_up()
        self.wake()

    async def put_response(self, response: service_pb2.ModelInferResponse, now: float) -> None:
        """Put in a response from the request's own stream, and wait until there is room for another."""
        self._heard = now
        self._responses.append(response)
        self.wake()
        if len(self._responses) >= _RESPONSES_LIMIT:
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

    def close(self) -> None:
        """Drop the reference to `give_up`: the traceback of its task's end refers back to this object."""
        self._give_up = _nobody

    @property
    def has_deltas(self) -> bool:
        """Whether there are deltas to take."""
        return bool(self._deltas)

    def take_deltas(self) -> list[AnswerDelta]:
        """Return the deltas received since the last call, in order; perhaps none."""
        deltas, self._deltas = self._deltas, []
        self._bytes = 0
        return deltas

    def take_response(self) -> service_pb2.ModelInferResponse | None:
        """Return the next response of the request's own stream, if there is one."""
        if not self._responses:
            return None
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return self._responses.popleft()

    async def more(self) -> bool:
        """Wait until something is put in; False if nothing will be. Call it only when everything was taken.

        Raises:
            TritonError: the answer failed.
        """
        if self._error is not None:
            raise self._error
        if self._ended:
            return False
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader  # as in `changed`: it is on the way of every token
        return True

    async def changed(self) -> None:
        """Wait until something is put in, or `wake` is called.

        Raises:
            TritonError: the answer failed.
        """
        if self._error is not None:
            raise self._error
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def wake(self) -> None:
        """Make the waiting task, if any, look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _nobody() -> None:
    """Nobody is left to give up."""
