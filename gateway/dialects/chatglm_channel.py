"""Delta channels of our own stream contract: see `wire.channel`."""

from collections.abc import Sequence
from operator import itemgetter

import msgspec
from tritonclient.grpc import service_pb2

from gateway.dialects.base import AnswerDelta, ModelReport
from gateway.dialects.chatglm import infer_request, request_tensors
from gateway.dialects.chatglm_answer import ChatGLMAnswer, not_understood, read
from gateway.generation import Event, Generation
from wire import names
from wire.channel import Frame, decode_frame
from wire.meta import Delivered, decode_meta
from wire.sampling import ChannelStream, OpenChannel, encode_sampling
from wire.strings import unpack_strings

_NOTHING = b""

_index = itemgetter(0)


class ChatGLMChannels:
    """The `ChannelDialect` of our contract; stateless."""

    def open(self, model: str, channel_id: str) -> service_pb2.ModelInferRequest:
        """Return the request that opens a channel to `model`; it overtakes generations in Triton's queue."""
        sampling = encode_sampling(OpenChannel(channel_id))
        return infer_request(model, channel_id, names.URGENT_PRIORITY, (_NOTHING, _NOTHING, sampling))

    def read_frame(self, response: service_pb2.ModelInferResponse) -> Frame:
        """Read a channel's response.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False):
            if tensor.name == names.META:
                try:
                    (document,) = unpack_strings(raw)
                    return decode_frame(document)
                except (ValueError, msgspec.MsgspecError) as error:
                    raise not_understood(str(error)) from error
        raise not_understood("a frame without its document")

    def request(
        self, generation: Generation, report: ModelReport, *, remaining_s: float, channel: ChannelStream
    ) -> service_pb2.ModelInferRequest:
        """Like `Dialect.request`, with the deltas going to `channel`."""
        tensors = request_tensors(generation, report, remaining_s=remaining_s, channel=channel)
        return infer_request(generation.model, generation.request_id, names.DEFAULT_PRIORITY, tensors)

    def decoder(self, generation: Generation, report: ModelReport) -> "ChannelledAnswer":
        """Return a decoder for the answer of the model that `report` is about to `generation`."""
        return ChannelledAnswer(generation, report)


class ChannelledAnswer(ChatGLMAnswer):
    """Reads one answer from the request's own stream and from its deltas on the channel."""

    def delivered(self, response: service_pb2.ModelInferResponse) -> tuple[int, Delivered] | None:
        """Return the choice that `response` ends, and how much of it must have come over the channel.

        Raises:
            UpstreamProtocolError: it cannot be understood, or ends a choice without saying so.
        """
        _, meta = read(response)
        if meta.finish_reason is not None and meta.delivered is None:
            raise not_understood("an end that does not say what came over the channel")
        return None if meta.delivered is None else (meta.index, meta.delivered)

    def deltas(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        """Return the events in the deltas from the channel, choice by choice, with plain text joined.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        events: list[Event] = []
        choice, text, tokens = 0, "", 0
        # The sort is stable: the order within a choice stays.
        for index, added, count, document in sorted(deltas, key=_index):
            if tokens and (index != choice or document is not None):
                events.append(self._plain(choice, text, tokens))
                text, tokens = "", 0
            choice = index
            if document is None:
                text += added
                tokens += count
            else:
                events += self._detailed(index, added, count, document)
        if tokens:
            events.append(self._plain(choice, text, tokens))
        return events

    def _detailed(self, index: int, text: str, tokens: int, document: bytes) -> list[Event]:
        try:
            meta = decode_meta(document)
        except msgspec.MsgspecError as error:
            raise not_understood(str(error)) from error
        self._check_order(meta)
        if meta.finish_reason is not None:
            raise not_understood("an end over the channel")
        if meta.index:
            raise not_understood("a choice is named beside its number on the channel")
        return self._delta(index, text, tokens, meta)
