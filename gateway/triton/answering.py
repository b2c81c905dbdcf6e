"""One request on one backend: a generation from the request to its events, or a tokenization.

What streams comes over a delta channel, if the contract has them. The request's own stream then carries
`accepted`, log-probabilities of the prompt, heartbeats and the last response of each choice, which says how
many deltas there were. Without a channel every response comes on the request's own stream. Knows neither how
backends are chosen nor what happens after a failure.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator

from tritonclient.grpc import service_pb2

from gateway.dialects.base import ChannelDecoder, ChannelDialect, Dialect, ModelReport, TokenizerDialect
from gateway.generation import Event, Generation
from gateway.tokenization import Tokenization, Tokens
from gateway.triton.channel import DeltaBuffer, DeltaChannel
from gateway.triton.client import Client
from gateway.triton.errors import Fault, TritonError
from wire.meta import Delivered
from wire.request import ChannelStream


async def answer_plainly(
    client: Client, dialect: Dialect, generation: Generation, report: ModelReport, *, idle_timeout_s: float
) -> AsyncGenerator[Event, None]:
    """Run `generation` with all of its answer on its own stream.

    Raises:
        TritonError: it failed.
        UpstreamProtocolError: the answer cannot be understood.
        InvalidRequestError: the model cannot express the request.
    """
    decoder = dialect.decoder(generation, report)
    responses = client.stream_infer(
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


@contextlib.asynccontextmanager
async def answer_over_channel(
    client: Client,
    channel: DeltaChannel,
    dialect: ChannelDialect,
    generation: Generation,
    report: ModelReport,
) -> AsyncIterator[AsyncGenerator[Event, None]]:
    """Run `generation` for a block, with its deltas on `channel` once that is open; yields its events.

    A block around the events, not a generator around theirs: each token would pass it.

    Raises:
        TritonError: it failed; `NO_CHANNEL` if the channel did not open, `CHANNEL_LOST` if it was lost.
        UpstreamProtocolError: the answer cannot be understood.
        InvalidRequestError: the model cannot express the request.
    """
    await channel.opened()
    numbers = channel.next_numbers(generation.n)
    address = ChannelStream(id=channel.id, stream=numbers.start)
    request = dialect.request(generation, report, remaining_s=_remaining_s(generation), channel=address)
    now = asyncio.get_running_loop().time()
    buffer = DeltaBuffer(numbers, now, lambda: own.cancel())  # noqa: PLW0108 - `own` does not exist yet
    with channel.deliver(buffer):
        own = asyncio.create_task(_read_own_stream(client, request, generation, buffer))
        try:
            decoder = dialect.decoder(generation, report)
            async with contextlib.aclosing(_merged(channel, buffer, decoder)) as events:
                yield events
            # Let the own stream end by its status: cancelled at the moment of its last response, it may keep
            # the model from ever being unloaded.
            await asyncio.wait({own})
        except TritonError as error:
            if error.fault is Fault.CHANNEL_LOST:
                channel.lose(address.id, error)
            raise
        finally:
            own.cancel()
            buffer.close()
            await asyncio.wait({own})


async def tokenize(
    client: Client, dialect: TokenizerDialect, tokenization: Tokenization, report: ModelReport
) -> Tokens:
    """Run `tokenization`.

    Raises:
        TritonError: it failed.
        UpstreamProtocolError: the answer cannot be understood.
        InvalidRequestError: the model cannot express it.
    """
    responses = client.stream_infer(
        dialect.tokenize(tokenization, report, remaining_s=_remaining_s(tokenization)),
        deadline=tokenization.deadline,
        idle_timeout_s=math.inf,  # there are no heartbeats
        headers=tokenization.headers,
    )
    async with contextlib.aclosing(responses):
        return dialect.read_tokens(tokenization, [response async for response in responses])


async def _merged(
    channel: DeltaChannel, buffer: DeltaBuffer, decoder: ChannelDecoder
) -> AsyncGenerator[Event, None]:
    """Merge deltas and responses into one ordered stream of events."""
    for event in await _first(buffer, decoder):
        yield event
    while True:
        for event in decoder.deltas(buffer.take_deltas()):
            yield event
        response = buffer.take_response()
        if response is None:
            # What came while the events above were taken is not waited for.
            if not buffer.has_deltas and not await buffer.more():
                break
            continue
        delivered = decoder.delivered(response)
        if delivered is not None:
            await _all_delivered(channel, buffer, *delivered)
            for event in decoder.deltas(buffer.take_deltas()):
                yield event
        for event in decoder.decode(response):
            yield event
        if decoder.complete:
            return  # whatever becomes of the channel now does not concern it
    decoder.end()


async def _first(buffer: DeltaBuffer, decoder: ChannelDecoder) -> list[Event]:
    """Return the events of the first response, which deltas may overtake."""
    while (first := buffer.take_response()) is None and await buffer.more():
        pass
    return [] if first is None else decoder.decode(first)


async def _all_delivered(
    channel: DeltaChannel, buffer: DeltaBuffer, index: int, delivered: Delivered
) -> None:
    """Wait for all deltas of a choice, since its last response may overtake some.

    Raises:
        TritonError: one was lost.
    """
    if not 0 <= index < len(buffer.received):
        return  # the decoder reports the fault
    channel.wake_after(delivered.frame, buffer)
    while buffer.received[index] < delivered.deltas and channel.last_frame < delivered.frame:
        await buffer.changed()
    if (received := buffer.received[index]) != delivered.deltas:
        detail = f"{received} of {delivered.deltas} deltas came by frame {delivered.frame}"
        raise TritonError(Fault.PROTOCOL, detail)


async def _read_own_stream(
    client: Client, request: service_pb2.ModelInferRequest, generation: Generation, buffer: DeltaBuffer
) -> None:
    """Put the responses of the request's own stream, and its end, into `buffer`."""
    loop = asyncio.get_running_loop()
    # No idle timeout here: the channel's reader sees the deltas too, and decides whether the model is silent.
    responses = client.stream_infer(
        request, deadline=generation.deadline, idle_timeout_s=math.inf, headers=generation.headers
    )
    try:
        async with contextlib.aclosing(responses):
            async for response in responses:
                await buffer.put_response(response, loop.time())
    except Exception as error:  # noqa: BLE001 - passed on to the reader of the buffer
        buffer.fail(error)
    else:
        buffer.end()


def _remaining_s(request: Generation | Tokenization) -> float:
    """Return the seconds left until the deadline.

    Raises:
        GatewayError: none are left; the request was not sent.
    """
    remaining_s = request.deadline - asyncio.get_running_loop().time()
    if remaining_s <= 0:
        raise TritonError(Fault.DEADLINE, "the deadline passed before it was sent").to_gateway()
    return remaining_s
