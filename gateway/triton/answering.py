"""One generation on one replica, from the request to its events, with or without a delta channel.

Without one, every response comes on the request's own stream. With one, that stream carries `accepted`,
heartbeats and the last response of each choice, and the channel carries the deltas; the last response says
how many there were. Knows neither how replicas are chosen nor what happens after a failure.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator

from tritonclient.grpc import service_pb2

from gateway.dialects.base import ChannelDecoder, ChannelDialect, Dialect, ModelReport
from gateway.generation import Event, Generation
from gateway.triton.channel import Channel
from gateway.triton.delta_link import DeltaLink
from gateway.triton.inbox import Inbox
from gateway.triton.status import Fault, TritonError
from wire.meta import Delivered
from wire.sampling import ChannelStream


async def answer_plainly(
    channel: Channel, dialect: Dialect, generation: Generation, report: ModelReport, *, idle_timeout_s: float
) -> AsyncGenerator[Event, None]:
    """Run `generation` with the whole answer on its own stream.

    Raises:
        TritonError: it failed.
        UpstreamProtocolError: the answer cannot be understood.
        InvalidRequestError: the model cannot express the request.
    """
    decoder = dialect.decoder(generation, report)
    responses = channel.stream_infer(
        dialect.request(generation, report, remaining_s=_remaining_s(generation)),
        deadline=generation.deadline,
        idle_timeout_s=idle_timeout_s,
        headers=generation.headers,
    )
    async with contextlib.aclosing(responses):
        async for response in responses:
            for event in decoder.decode(response):
                yield event
    decoder.end()


async def answer_over_channel(
    channel: Channel, link: DeltaLink, dialect: ChannelDialect, generation: Generation, report: ModelReport
) -> AsyncGenerator[Event, None]:
    """Run `generation` with its deltas on the open channel of `link`.

    Raises:
        TritonError: it failed; `CHANNEL_LOST` if the channel did.
        UpstreamProtocolError: the answer cannot be understood.
        InvalidRequestError: the model cannot express the request.
    """
    numbers = link.next_numbers(generation.n)
    address = ChannelStream(id=link.id, stream=numbers.start)
    request = dialect.request(generation, report, remaining_s=_remaining_s(generation), channel=address)
    now = asyncio.get_running_loop().time()
    inbox = Inbox(numbers, now, lambda: own.cancel())  # noqa: PLW0108 - `own` does not exist yet
    with link.deliver(inbox):
        own = asyncio.create_task(_read_own_stream(channel, request, generation, inbox))
        answer = _Answer(link, inbox, dialect.decoder(generation, report))
        try:
            async with contextlib.aclosing(answer.events()) as events:
                async for event in events:
                    yield event
            # Let the own stream end by its status: cancelled at the moment of its last response, it may keep
            # the model from ever being unloaded.
            await asyncio.wait({own})
        except TritonError as error:
            if error.fault is Fault.CHANNEL_LOST:
                link.lose(address.id, error)
            raise
        finally:
            own.cancel()
            await asyncio.wait({own})
            inbox.close()


class _Answer:
    """Merges deltas and responses into one ordered stream of events."""

    def __init__(self, link: DeltaLink, inbox: Inbox, decoder: ChannelDecoder) -> None:
        self._link = link
        self._inbox = inbox
        self._decoder = decoder

    async def events(self) -> AsyncGenerator[Event, None]:
        inbox, decoder = self._inbox, self._decoder
        while (first := inbox.take_response()) is None and await inbox.more():
            pass  # Deltas may overtake `accepted`.
        for event in decoder.decode(first) if first is not None else ():
            yield event
        while True:
            for event in decoder.deltas(inbox.take_deltas()):
                yield event
            response = inbox.take_response()
            if response is None:
                if not await inbox.more():
                    break
                continue
            delivered = decoder.delivered(response)
            if delivered is not None:
                await self._all_delivered(*delivered)
                for event in decoder.deltas(inbox.take_deltas()):
                    yield event
            for event in decoder.decode(response):
                yield event
        decoder.end()

    async def _all_delivered(self, index: int, delivered: Delivered) -> None:
        """Wait for all deltas of a choice, since its last response may overtake some.

        Raises:
            TritonError: one was lost.
        """
        inbox, link = self._inbox, self._link
        if not 0 <= index < len(inbox.received):
            return  # the decoder reports the fault
        link.wake_after(delivered.frame, inbox)
        while inbox.received[index] < delivered.deltas and link.last_frame < delivered.frame:
            await inbox.changed()
        if (received := inbox.received[index]) != delivered.deltas:
            detail = f"{received} of {delivered.deltas} deltas came by frame {delivered.frame}"
            raise TritonError(Fault.PROTOCOL, detail)


async def _read_own_stream(
    channel: Channel, request: service_pb2.ModelInferRequest, generation: Generation, inbox: Inbox
) -> None:
    """Put the responses of the request's own stream, and its end, into `inbox`."""
    loop = asyncio.get_running_loop()
    # No idle timeout here: the channel's reader sees the deltas too, and decides whether the model is silent.
    responses = channel.stream_infer(
        request, deadline=generation.deadline, idle_timeout_s=math.inf, headers=generation.headers
    )
    try:
        async with contextlib.aclosing(responses):
            async for response in responses:
                inbox.put_response(response, loop.time())
    except Exception as error:  # noqa: BLE001 - passed on to the reader of the inbox
        inbox.fail(error)
    else:
        inbox.end()


def _remaining_s(generation: Generation) -> float:
    """Return the seconds left until the deadline.

    Raises:
        GatewayError: none are left; the request was not sent.
    """
    remaining_s = generation.deadline - asyncio.get_running_loop().time()
    if remaining_s <= 0:
        raise TritonError(Fault.DEADLINE, "the deadline passed before it was sent").to_gateway()
    return remaining_s
