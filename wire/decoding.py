"""Decodes documents that have parts of arbitrary structure."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_bounded(decoder: "msgspec.json.Decoder[T]", document: bytes) -> T:
    """Decode `document`; nesting that is too deep is reported as an error in the document.

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
