"""How bytes of tokens become text: the model's side shows it, the gateway counts its characters."""

import codecs
from typing import Final

_REPLACE_EACH: Final = "tritongate-replace-each"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH, _replace_each)


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Return a decoder that turns each byte which cannot be part of a character into U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")(_REPLACE_EACH)
