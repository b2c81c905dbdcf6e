"""A scripted model with delta channels: the test says frame by frame what comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec

from tests.gateway.triton.fake_triton import FakeModel, Response, inputs_of, reply
from wire.channel import Frame, encode_frame
from wire.meta import Accepted, Delivered, Meta, Usage, encode_meta
from wire.refusal import RefusalCode, refusal_text
from wire.request import decode_request


class FakeChannels:
    """Takes over a fake model's answers; only the newest channel can be written to."""

    def __init__(self, model: FakeModel) -> None:
        model.channel = self._channel
        model.answer = self._answer
        self.ids: list[str] = []
        """Of every channel that was opened."""
        self.closed = 0
        self.number = 0
        """Of the newest frame."""
        self.own: dict[int, asyncio.Queue[Response]] = {}
        """By stream, where the responses of requests on a channel come from."""
        self.plain = 0
        """Requests without a channel; they are answered `Hello`."""
        self.silent = False
        """Whether channels stay silent instead of opening."""
        self._frames: asyncio.Queue[Response | None] = asyncio.Queue()

    def frame(
        self,
        *deltas: tuple[int, str] | tuple[int, str, Meta],
        skip: int = 0,
        ids: list[list[int]] | None = None,
    ) -> None:
        """Send a frame of (stream, text), one token each; `skip` leaves out so many numbers."""
        self.number += 1 + skip
        metas = {
            place: msgspec.Raw(encode_meta(delta[2])) for place, delta in enumerate(deltas) if len(delta) == 3
        }
        frame = Frame(
            frame=self.number,
            streams=[delta[0] for delta in deltas],
            tokens=[1] * len(deltas),
            texts=[delta[1] for delta in deltas],
            ids=ids or [],
            metas=metas,
        )
        self.send(encode_frame(frame))

    def send(self, document: bytes) -> None:
        self._frames.put_nowait(reply(meta=document))

    def lose(self) -> None:
        """End the channel as when something between resets it."""
        self._frames.put_nowait(None)

    def accept(self, stream: int, *, prompt_tokens: int = 5) -> None:
        accepted = Accepted(request_id="r", prompt_tokens=prompt_tokens)
        self.own[stream].put_nowait(reply(meta=Meta(accepted=accepted)))

    def finish(
        self,
        stream: int,
        deltas: int,
        *,
        frame: int | None = None,
        text: str = "",
        index: int = 0,
        last: bool = True,
        completion_tokens: int | None = None,
    ) -> None:
        """Send the last response of a choice of the request whose numbers begin with `stream`."""
        meta = Meta(
            index=index,
            tokens=1,
            finish_reason="stop",
            usage=Usage(prompt_tokens=5, completion_tokens=completion_tokens or deltas + 1) if last else None,
            delivered=Delivered(deltas=deltas, frame=self.number if frame is None else frame),
        )
        self.own[stream].put_nowait(reply(text, meta, final=last))

    async def _channel(self, request: Any, context: Any) -> AsyncIterator[Response]:
        self.ids.append(decode_request(inputs_of(request)["sampling"]).open_channel)
        self._frames = asyncio.Queue()
        self.number = 0
        try:
            if self.silent:
                await asyncio.Event().wait()
            yield reply(meta=encode_frame(Frame(frame=0)))
            while (frame := await self._frames.get()) is not None:
                yield frame
            await context.abort(grpc.StatusCode.CANCELLED, "reset")
        finally:
            self.closed += 1

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[Response]:
        channel = decode_request(inputs_of(request)["sampling"]).channel
        if channel is None:
            self.plain += 1
            yield reply(meta=Meta(accepted=Accepted(request_id="r", prompt_tokens=5)))
            usage = Usage(prompt_tokens=5, completion_tokens=1)
            yield reply("Hello", Meta(tokens=1, finish_reason="stop", usage=usage), final=True)
            return
        if channel.id != self.ids[-1] or self.closed == len(self.ids):
            text = refusal_text(RefusalCode.CHANNEL_LOST, "it is not open")
            yield Response(error_message=text)
            return
        responses = self.own[channel.stream] = asyncio.Queue()
        final = False
        while not final:
            response = await responses.get()
            final = response.infer_response.parameters["triton_final_response"].bool_param
            yield response
