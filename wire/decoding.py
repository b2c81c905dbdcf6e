"""Decoding of documents with parts of arbitrary shape."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_bounded(decoder: "msgspec.json.Decoder[T]", document: bytes) -> T:
    """Decode `document`, treating too deep nesting as an error in the document.

    Raises:
        msgspec.ValidationError: nested too deeply, or not what the decoder expects.
        msgspec.DecodeError: not JSON, or not UTF-8.
    """
    try:
        return decoder.decode(document)
    except RecursionError:
        raise msgspec.ValidationError("The document is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
