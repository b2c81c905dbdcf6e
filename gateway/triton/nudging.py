"""Sends the nudges for one model's entries on one Triton; `unheard` decides when."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from tritonclient.grpc import service_pb2

from gateway.dialects.base import NudgeDialect
from gateway.triton.channel import Channel
from gateway.triton.unheard import Unheard

_TAKEN = 32
"""Half of an execution of `M-stream`: other gateways have requests there, too."""

Make = Callable[[str], service_pb2.ModelInferRequest]


def nudge_when_unheard(
    channel: Channel,
    model: str,
    dialect: NudgeDialect,
    *,
    after_s: float,
    timeout_s: float,
    note: Callable[[], None],
) -> None:
    """Send nudges to the entries of `model` for requests over `channel` that Triton may have forgotten.

    Args:
        channel: to the Triton.
        model: its id, without the suffix of the repository entries.
        dialect: what a nudge is.
        after_s: see `Unheard`.
        timeout_s: limit for the answer to a nudge.
        note: called for each nudge.
    """

    async def stream(make: Make) -> None:
        note()
        responses = channel.stream_infer(
            make(model), deadline=_in(timeout_s), idle_timeout_s=timeout_s, noted=False
        )
        async with contextlib.aclosing(responses):
            async for _ in responses:
                pass

    async def whole(make: Make) -> None:
        note()
        await channel.infer(make(model), deadline=_in(timeout_s), noted=False)

    for send, make, taken in ((stream, dialect.streamed, _TAKEN), (whole, dialect.whole, 0)):
        unheard = Unheard(partial(send, make), after_s=after_s, taken=taken)
        channel.note_unheard(make(model).model_name, unheard)


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
