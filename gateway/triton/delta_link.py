"""One replica's delta channel: opened when first needed, kept open, and reopened after a loss.

Reads the frames and puts each delta into its generation's inbox. When the channel ends, so does every
generation on it: none waits for a channel that is gone. Knows neither prompts nor why a replica is chosen.

    closed ──wanted──▶ opening ──frame 0──▶ open ──lost, or retired and idle──▶ closed (a loss: for a while)
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import secrets
from collections.abc import Iterator

from gateway.dialects.base import ChannelDialect
from gateway.errors import UpstreamProtocolError
from gateway.triton.backoff import Backoff
from gateway.triton.channel import Channel
from gateway.triton.inbox import Inbox
from gateway.triton.status import Fault, TritonError
from wire.channel import Frame

_log = logging.getLogger(__name__)

OPEN_WAIT_S = 1.0
"""How long a generation waits for the channel to open before it does without."""

_STEADY_S = 5.0
"""The loss of a channel that was open for longer does not count as another failed attempt."""

_KEPT_FAULTS = {Fault.CLOSED, Fault.STUB_DEAD}
"""Faults passed on as they are, because they say more than `CHANNEL_LOST`."""


class DeltaLink:
    """The channel to `model` on the Triton behind `channel`.

    Args:
        model: its id.
        channel: the connection to the Triton.
        idle_timeout_s: after so many seconds without a frame the channel counts as lost; after so many
            without anything for a generation, that generation fails.
        backoff: the pauses before it is opened again after a loss.
    """

    def __init__(self, model: str, channel: Channel, *, idle_timeout_s: float, backoff: Backoff) -> None:
        self._model = model
        self._channel = channel
        self._idle_timeout_s = idle_timeout_s
        self._backoff = backoff
        self._loop = asyncio.get_running_loop()
        self._next_number = 0
        self._inboxes: dict[int, Inbox] = {}
        self._finishing: dict[Inbox, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        """Set once an attempt to open has succeeded or failed."""
        self._opened_at = 0.0
        self._closed_until = -math.inf
        self._retired = False
        self._next_check = 0.0
        self.is_open = False
        self.id = ""
        """The id of the channel that is open now, new at each opening."""
        self.last_frame = -1
        """Number of the newest frame received."""

    async def open(self, dialect: ChannelDialect) -> bool:
        """Open the channel unless it is open or was lost a short time ago; return whether it is open."""
        self._retired = False
        if self._task is None and self._loop.time() >= self._closed_until:
            self._settled.clear()
            self._task = asyncio.create_task(
                self._keep(dialect),
                name=f"delta channel of {self._model}",
                context=contextvars.Context(),  # not the context of the request that happened to come first
            )
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)
        if self._task is not None and not self.is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OPEN_WAIT_S):
                    await self._settled.wait()
        return self.is_open

    def next_numbers(self, count: int) -> range:
        """Return numbers for a generation's choices that no other generation has on this channel."""
        first = self._next_number
        self._next_number += count
        return range(first, self._next_number)

    @contextlib.contextmanager
    def deliver(self, inbox: Inbox) -> Iterator[None]:
        """During the block, put deltas with the inbox's numbers into `inbox`."""
        self._inboxes |= dict.fromkeys(inbox.numbers, inbox)
        try:
            yield
        finally:
            for number in inbox.numbers:
                del self._inboxes[number]
            self._finishing.pop(inbox, None)
            self._close_if_retired()

    def wake_after(self, frame: int, inbox: Inbox) -> None:
        """Wake `inbox` once frame `frame` was received."""
        self._finishing[inbox] = frame

    def lose(self, channel_id: str, error: TritonError) -> None:
        """Give up the channel if it still has this id: the model says that it is not open."""
        if channel_id == self.id and self._task is not None:
            self._lost(error)

    def retire(self) -> None:
        """Close it as soon as no generation uses it: an open channel keeps its model from being unloaded."""
        self._retired = True
        self._close_if_retired()

    async def close(self) -> None:
        """Close it now."""
        self._end(TritonError(Fault.CLOSED, "the pool was closed"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _close_if_retired(self) -> None:
        if self._retired and not self._inboxes:
            self._end(TritonError(Fault.CHANNEL_LOST, "the channel was closed"))

    async def _keep(self, dialect: ChannelDialect) -> None:
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
        """Record a loss: generations on the channel end, and no new channel is opened for a while."""
        _log.warning("delta channel lost", extra=self._extra() | {"detail": error.detail})
        now = self._loop.time()
        if self.is_open and now - self._opened_at > _STEADY_S:
            self._backoff.reset()
        self._closed_until = now + self._backoff.next()
        known = error.fault in _KEPT_FAULTS
        self._end(error if known else TritonError(Fault.CHANNEL_LOST, error.detail))

    def _end(self, error: TritonError) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.is_open = False
        self._settled.set()
        for inbox in self._inboxes.values():
            inbox.fail(error)

    async def _read(self, dialect: ChannelDialect) -> None:
        self.id = secrets.token_hex(16)
        self.last_frame = -1
        responses = self._channel.stream_infer(
            dialect.open(self._model, self.id), deadline=math.inf, idle_timeout_s=self._idle_timeout_s
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
        inboxes, metas = self._inboxes, frame.metas
        for place, (stream, text, tokens) in enumerate(
            zip(frame.streams, frame.texts, frame.tokens, strict=True)
        ):
            inbox = inboxes.get(stream)
            if inbox is not None:  # None if its client has left
                document = metas.get(place) if metas else None
                inbox.put(stream, text, tokens, None if document is None else bytes(document), now)
        for inbox, number in self._finishing.items():
            if number <= frame.frame:
                inbox.wake()
        if not self.is_open:
            self._opened_at = now
            self.is_open = True
            self._settled.set()
        if now >= self._next_check:
            self._give_up_silent(now)

    def _give_up_silent(self, now: float) -> None:
        """End generations for which nothing has come for too long; checked four times per timeout."""
        self._next_check = now + self._idle_timeout_s / 4
        for inbox in self._inboxes.values():
            if now - inbox.heard > self._idle_timeout_s:
                inbox.fail(TritonError(Fault.SILENT, f"no response within {self._idle_timeout_s} s"))

    def _extra(self) -> dict[str, str]:
        return {"model": self._model, "upstream": self._channel.address}
