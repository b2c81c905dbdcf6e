"""Makes a `tokenizer.model` of any number of pieces without training, for checkpoints of random weights.

The file is SentencePiece's ModelProto (`sentencepiece_model.proto`), written here field by field, because the
classes that come with sentencepiece need another protobuf runtime than Triton's client.
"""

import itertools
import string
import struct
from collections.abc import Iterator

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_BPE = 2

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_HAN = range(0x4E00, 0x9FA6)
_LETTERS = string.ascii_lowercase


def tokenizer_model(pieces: int) -> bytes:
    """Return a BPE model of `pieces` pieces: ChatGLM's control and byte pieces, then characters, then words.

    Raises:
        ValueError: `pieces` is below 512, too few for bytes and printable ASCII.
    """
    names = list(itertools.islice(_names(), pieces))
    if pieces < 2 * 256:
        raise ValueError(f"{pieces} pieces are too few")
    model = b"".join(
        _message(1, _string(1, name) + _float(2, -float(rank)) + _integer(3, kind))
        for rank, (name, kind) in enumerate(names)
    )
    trainer = _integer(3, _BPE) + _integer(4, pieces) + _integer(35, 1)  # byte_fallback
    ids = _integer(40, 0) + _integer(41, 1) + _integer(42, 2)  # unknown, begin, end
    normalizer = _string(1, "identity") + _integer(3, 1) + _integer(4, 0) + _integer(5, 1)
    return model + _message(2, trainer + ids) + _message(3, normalizer)


def _names() -> Iterator[tuple[str, int]]:
    yield from (("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("</s>", _CONTROL))
    yield from ((f"<0x{byte:02X}>", _BYTE) for byte in range(256))
    characters = [_SPACE, *map(chr, range(0x21, 0x7F)), *map(chr, _HAN)]
    yield from ((character, _NORMAL) for character in characters)
    for length in itertools.count(1):
        for letters in itertools.product(_LETTERS, repeat=length):
            word = "".join(letters)
            yield _SPACE + word, _NORMAL
            if length > 1:
                yield word, _NORMAL


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _string(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
