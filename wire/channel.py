"""The delta channel: one stream that brings a client the deltas of all its generations, one frame per step.

A client opens it with `{"open_channel": id}` and names it in the `channel` of its generations. The
generations' own streams then carry only `accepted` or a refusal, heartbeats while nothing else is sent for
them, and the last response of each choice. In that response, `delivered` says how many deltas went over the
channel, so that no loss goes unnoticed. The document below is the `meta` of every response to `open_channel`.
"""

from typing import Annotated, Literal

import msgspec

from wire.decoding import decode_bounded


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What one engine step, or several merged ones, added to the generations of a channel.

    Frame 0 says that the channel is open; it and heartbeats hold no deltas. The deltas are stored as columns,
    because a frame holds hundreds of them: the n-th item of each list belongs to the n-th delta. A choice has
    at most one delta in a frame.

    Raises:
        ValueError: columns of different lengths, or a `metas` key without a delta.
    """

    v: Literal[1] = 1
    frame: Annotated[int, msgspec.Meta(ge=0)]
    """The number of this response on the channel, without gaps."""
    streams: list[int] = []
    """The choice's number on the channel: its generation's `channel.stream` plus the index of the choice."""
    tokens: list[int] = []
    """Number of sampled tokens that the delta covers."""
    texts: list[str] = []
    ids: list[list[int]] = []
    """The ids of those tokens, if a generation of the channel asked for them (`ChannelStream.ids`): no others
    have any. Without such a generation the whole column is left out."""
    metas: dict[int, msgspec.Raw] = {}
    """By a delta's index in the columns: everything else about the delta, as a `wire.meta.Meta` document."""

    def __post_init__(self) -> None:
        """Check that the columns have equal lengths, and that each key of `metas` is a delta's index."""
        count = len(self.streams)
        if len(self.tokens) != count or len(self.texts) != count or len(self.ids) not in {0, count}:
            raise ValueError("the columns of a frame differ in length")
        if self.metas and not (min(self.metas) >= 0 and max(self.metas) < count):
            raise ValueError("a frame has metas of a delta that it does not hold")


_decoder = msgspec.json.Decoder(Frame)


def decode_frame(document: bytes) -> Frame:
    """Read the `meta` tensor of a channel's response.

    Raises:
        msgspec.ValidationError: an unknown key, a wrong type, or columns that do not fit together.
        msgspec.DecodeError: not JSON, or not UTF-8.
    """
    return decode_bounded(_decoder, document)


def encode_frame(frame: Frame) -> bytes:
    """Write the `meta` tensor of a channel's response; keys at their default are left out."""
    return msgspec.json.encode(frame)
