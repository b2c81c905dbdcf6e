"""Answers over one replica's delta channel, which is kept open while its model serves.

What streams comes over the channel. The request's own stream then carries `accepted`, log-probabilities of
the prompt, heartbeats and the last response of each choice, which says how many deltas there were. When the
channel ends, so does every answer on it: none waits for a channel that is gone. Knows neither prompts nor why
a replica is chosen.

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
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from time import perf_counter

from gateway.core.backoff import Backoff
from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.errors import UpstreamProtocolError
from gateway.telemetry.tracing import Headers
from gateway.triton.buffer import DeltaBuffer
from gateway.triton.client import Cancel, Client, remaining_s
from gateway.triton.dialects.base import ChannelDecoder, Channels, ModelReport, Response
from gateway.triton.errors import Fault, TritonError
from wire.channel import Frame
from wire.meta import Delivered
from wire.request import ChannelStream

_log = logging.getLogger(__name__)

OPEN_WAIT_S = 5.0
"""How long a generation waits for the channel to open before its backend counts as unavailable."""

_STEADY_S = 5.0
"""The loss of a channel that was open for longer does not count as another failed attempt."""

_LONG_S = 0.002
"""Readers that write for less than this are never behind."""

_SPARE = 0.25
"""They are behind if the next frame comes before this share of the time that they wrote for has passed. They
are then told of it as late as that: what comes meanwhile is written together."""

_LONGEST_S = 0.05
"""No frame is kept for longer: whatever held the loop up may have been there once."""

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
        self._channels: Channels | None = None
        """The contract; None: it was never started, is retired or closed, and is not opened again."""
        self._next_number = 0
        self._buffers: dict[int, DeltaBuffer] = {}
        self._finishing: dict[DeltaBuffer, int] = {}
        """Those that wait for a frame, with its number."""
        self._fresh: dict[DeltaBuffer, None] = {}
        """Those with deltas of which their readers do not know yet."""
        self._holding: asyncio.TimerHandle | None = None
        """Will tell them."""
        self._written_at = 0.0
        """When readers had last written all that they were told of, by `perf_counter`."""
        self._writing_s = 0.0
        """How long they took for that."""
        self._task: asyncio.Task[None] | None = None
        """Opens and reads the channel, perhaps after a pause; None: it is closed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = False
        """Whether generations can name it."""
        self._settled = asyncio.Event()
        """Set while it is open, and while it is not to be opened: nobody waits for it then."""
        self._opened_at = 0.0
        self._failing = False
        """Whether the latest attempt to open it has failed."""
        self._next_check = 0.0
        self.id = ""
        """The id of the channel that is open now, new at each opening."""
        self.last_frame = -1
        """Number of the newest frame received."""
        self.delivered_at = -math.inf
        """When the newest one with deltas was, on the event loop's clock."""

    def start(self, channels: Channels) -> None:
        """Open the channel, and open it again whenever it is lost, until it is retired or closed."""
        self._channels = channels
        if not self.is_open:
            self._settled.clear()
        if self._task is None:
            self._begin(channels, pause_s=0.0)

    async def opened(self) -> None:
        """Wait a moment until the channel is open.

        Raises:
            TritonError: it is not, or is not to be opened any more, as its model is gone; `NO_CHANNEL`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                await self._settled.wait()
        if not self.is_open:
            raise TritonError(Fault.NO_CHANNEL, "it does not open, or its model has gone")

    def retire(self) -> None:
        """Close it as soon as no generation uses it: an open channel keeps its model from being unloaded."""
        self._channels = None
        self._settled.set()
        self._close_if_retired()

    async def close(self) -> None:
        """Close it now, for good."""
        self._channels = None
        self._settled.set()
        self._end(TritonError(Fault.CLOSED, "the pool was closed"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    @contextlib.asynccontextmanager
    async def answer(
        self,
        channels: Channels,
        generation: Generation,
        report: ModelReport,
        headers: Headers,
        *,
        decoder: ChannelDecoder | None = None,
        cancel: Cancel | None = None,
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Run `generation` for a block, with its deltas on the channel once that is open; yields its events.

        A block around the events, not a generator around theirs: each token would pass it. `decoder` reads
        the answer; None: a new one of `channels`. `cancel` is as for `Client.stream_infer`.

        Raises:
            TritonError: it failed; `NO_CHANNEL` if the channel did not open, `CHANNEL_LOST` if it was lost.
            UpstreamProtocolError: the answer cannot be understood.
            InvalidRequestError: the model cannot express the request.
        """
        await self.opened()
        buffer = self.new_buffer(generation.n)
        address = ChannelStream(id=self.id, stream=buffer.numbers.start, ids=generation.resumable)
        request = channels.request(generation, report, remaining_s(generation.deadline), address)
        with self.deliver(buffer):
            responses = self._client.stream_infer(
                # No idle timeout here: the channel's reader sees the deltas too, and decides whether the
                # model is silent.
                request,
                deadline=generation.deadline,
                idle_timeout_s=math.inf,
                headers=headers,
                cancel=cancel,
            )
            own = asyncio.create_task(self._read_own_stream(responses, buffer))
            buffer.own = own
            try:
                reader = decoder or channels.decoder(generation, report)
                async with contextlib.aclosing(self._merged(buffer, reader)) as events:
                    yield events
                # The own stream ends by itself: its final response has come.
                await asyncio.wait({own})
            except TritonError as error:
                if error.fault is Fault.CHANNEL_LOST:
                    self.lose(address.id, error)
                raise
            finally:
                own.cancel()
                buffer.own = None  # the traceback of its task's end refers back to the buffer
                await asyncio.wait({own})

    def new_buffer(self, choices: int) -> "DeltaBuffer":
        """Return a buffer with numbers for a generation's choices that no other has on this channel."""
        first = self._next_number
        self._next_number += choices
        return DeltaBuffer(range(first, self._next_number), self._loop.time())

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
            self._fresh.pop(buffer, None)
            self._close_if_retired()

    def lose(self, channel_id: str, error: TritonError) -> None:
        """Give up the channel if it still has this id: the model says that it is not open."""
        if channel_id == self.id and self.is_open:
            self._lost(error)

    async def _read_own_stream(
        self, responses: AsyncGenerator[Response, None], buffer: "DeltaBuffer"
    ) -> None:
        """Put the responses of the request's own stream, and its end, into `buffer`."""
        try:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await buffer.put_response(response, self._loop.time())
        except Exception as error:  # noqa: BLE001 - passed on to the reader of the buffer
            buffer.fail(error)
        else:
            buffer.end()

    async def _merged(self, buffer: "DeltaBuffer", decoder: ChannelDecoder) -> AsyncGenerator[Event, None]:
        """Merge deltas and responses into one ordered stream of events."""
        for event in await self._first(buffer, decoder):
            yield event
        while True:
            for event in decoder.deltas(buffer.take_deltas()):
                yield event
            if not buffer.responses:
                # What came while the events above were taken is not waited for.
                if not buffer.deltas and not await buffer.more():
                    break
                continue
            response = buffer.take_response()
            delivered = decoder.delivered(response)
            if delivered is not None:
                await self._all_delivered(buffer, *delivered)
                for event in decoder.deltas(buffer.take_deltas()):
                    yield event
            for event in decoder.decode(response):
                yield event
            if decoder.complete:
                return  # whatever becomes of the channel now does not concern it
        decoder.end()

    async def _first(self, buffer: "DeltaBuffer", decoder: ChannelDecoder) -> list[Event]:
        """Return the events of the first response that is no heartbeat; deltas may overtake it."""
        events: list[Event] = []
        while not events:
            if buffer.responses:
                events = decoder.decode(buffer.take_response())
            elif not await buffer.more():
                break
        return events

    async def _all_delivered(self, buffer: "DeltaBuffer", index: int, delivered: Delivered) -> None:
        """Wait for all deltas of a choice, since its last response may overtake some.

        Raises:
            TritonError: one was lost.
        """
        if not 0 <= index < len(buffer.received):
            return  # the decoder reports the fault
        self._finishing[buffer] = delivered.frame
        while buffer.received[index] < delivered.deltas and self.last_frame < delivered.frame:
            await buffer.changed()
        if (received := buffer.received[index]) != delivered.deltas:
            # A lost channel is why: the frames of the next one are not those that were meant.
            buffer.check()
            detail = f"{received} of {delivered.deltas} deltas came by frame {delivered.frame}"
            raise TritonError(Fault.PROTOCOL, detail)

    def _close_if_retired(self) -> None:
        if self._channels is None and not self._buffers:
            self._end(TritonError(Fault.CHANNEL_LOST, "the channel was closed"))

    def _begin(self, channels: Channels, *, pause_s: float) -> None:
        self._task = asyncio.create_task(
            self._keep(channels, pause_s),
            name=f"delta channel of {self._model}",
            context=contextvars.Context(),  # not the context of a request that found it lost
        )
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    async def _keep(self, channels: Channels, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        try:
            await self._read(channels)
        except TritonError as error:
            self._lost(error)
        except UpstreamProtocolError as error:
            self._lost(TritonError(Fault.PROTOCOL, error.message))
        except Exception as error:  # noqa: BLE001 - the task's outermost frame: whoever waits must be told
            _log.exception("the delta channel failed", extra=self._extra())
            self._lost(TritonError(Fault.UNKNOWN, f"the gateway failed: {type(error).__name__}"))

    async def _read(self, channels: Channels) -> None:
        self.id = secrets.token_hex(16)
        self.last_frame = -1
        request = channels.open(self._model, self.id)
        responses = self._client.stream_infer(request, deadline=math.inf, idle_timeout_s=self._idle_timeout_s)
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._take(channels.read_frame(response))
        raise TritonError(Fault.CHANNEL_LOST, "the model closed the channel")

    def _take(self, frame: Frame) -> None:
        if frame.frame != self.last_frame + 1:
            raise TritonError(Fault.CHANNEL_LOST, f"frame {frame.frame} came after {self.last_frame}")
        self.last_frame = frame.frame
        now = self._loop.time()
        buffers, metas, fresh = self._buffers, frame.metas, self._fresh
        ids = frame.ids
        if frame.streams:
            self.delivered_at = now
        for place, (stream, text, tokens) in enumerate(
            zip(frame.streams, frame.texts, frame.tokens, strict=True)
        ):
            buffer = buffers.get(stream)
            if buffer is not None:  # None if its client has left
                document = metas.get(place) if metas else None
                details = None if document is None else bytes(document)
                buffer.put(stream, text, tokens, details, now, ids=ids[place] if ids else ())
                fresh[buffer] = None
        self._tell_or_hold()
        for buffer, number in self._finishing.items():
            if number <= frame.frame:
                buffer.wake()
        if not self.is_open:
            self._opened_at = now
            self.is_open = True
            self._settled.set()
        if now >= self._next_check:
            self._give_up_silent(now)

    def _tell_or_hold(self) -> None:
        """Have what came be written: at once, or with the next frames where readers do not keep up with them.

        Each frame is one turn of the loop, in which all its readers write. Frames that come faster than that
        would wait in ever longer queues, since nobody looks for the next one meanwhile.
        """
        if not self._fresh or self._holding is not None:
            return
        spare_s = min(_SPARE * self._writing_s, _LONGEST_S)
        if self._writing_s > _LONG_S and perf_counter() - self._written_at < spare_s:
            self._holding = self._loop.call_later(spare_s, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        self._holding = None
        for buffer in self._fresh:
            buffer.wake()
        self._fresh.clear()
        self._loop.call_soon(self._note_written, perf_counter())  # behind their tasks

    def _note_written(self, since: float) -> None:
        self._written_at = perf_counter()
        self._writing_s = self._written_at - since

    def _give_up_silent(self, now: float) -> None:
        """End generations for which nothing has come for too long; checked four times per timeout."""
        self._next_check = now + self._idle_timeout_s / 4
        for buffer in self._buffers.values():
            if buffer.silent_s(now) > self._idle_timeout_s:
                buffer.fail(TritonError(Fault.SILENT, f"no response within {self._idle_timeout_s} s"))

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
        if self._channels is not None:
            self._begin(self._channels, pause_s=self._backoff.next())

    def _end(self, error: TritonError) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.is_open = False
        if self._channels is not None:
            self._settled.clear()
        for buffer in self._buffers.values():
            buffer.fail(error)

    def _extra(self) -> dict[str, str]:
        return {"model": self._model, "upstream": self._client.address}
