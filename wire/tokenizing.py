"""The `request` document of a tokenizer entry: it has exactly one of text, messages and ids."""

from typing import Annotated

import msgspec

from wire.decoding import decode_bounded
from wire.history import Turn
from wire.limits import IDS_LIMIT
from wire.sampling import Metadata, TokenId


class Tokenizing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request to turn `text` or `messages` into ids, or `ids` into text.

    `text` gets no special ids, except with `prefix`; `messages` are rendered in the model's chat format.
    """

    text: str | None = None
    prefix: bool = False
    """Put the ids with which every prompt begins before those of `text`, as for a raw prompt."""
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)] | None = None
    add_generation_prompt: bool = True
    """Whether rendered messages end where the model's answer begins."""
    answer_metadata: Metadata | None = None
    """The answer's first line, as in a generation: rendered messages end after it."""
    ids: Annotated[list[TokenId], msgspec.Meta(max_length=IDS_LIMIT)] | None = None
    strings: bool = False
    """Also return how each id is displayed, in the output `tokens`."""

    def __post_init__(self) -> None:
        """Check that exactly one of the three is given, and only the options that belong to it.

        Raises:
            ValueError: none or several of the three are given, `prefix` without `text`, or `answer_metadata`
                without messages that end where an answer begins (a ValidationError while decoding).
        """
        given = [name for name in ("text", "messages", "ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of text, messages and ids is needed, got {given or 'none'}")
        if self.prefix and self.text is None:
            raise ValueError("prefix belongs to text")
        if self.answer_metadata is not None and (self.messages is None or not self.add_generation_prompt):
            raise ValueError("answer_metadata belongs to messages behind which the answer begins")


_decoder = msgspec.json.Decoder(Tokenizing)
_encoder = msgspec.json.Encoder()


def decode_tokenizing(document: bytes) -> Tokenizing:
    """Read the `request` tensor.

    Raises:
        msgspec.ValidationError: not exactly one of the three, an unknown key, a wrong type, or nested too
            deeply.
        msgspec.DecodeError: not JSON.
    """
    return decode_bounded(_decoder, document)


def encode_tokenizing(request: Tokenizing) -> bytes:
    """Write the `request` tensor."""
    return _encoder.encode(request)
