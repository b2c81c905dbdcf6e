import msgspec
import pytest

from wire.history import Turn
from wire.tokenizing import Tokenizing, decode_tokenizing, encode_tokenizing


@pytest.mark.parametrize(
    "request_document",
    [
        Tokenizing(text="", prefix=True, strings=True),
        Tokenizing(messages=[Turn("user", "a")], add_generation_prompt=False),
        Tokenizing(messages=[Turn("user", "a")], answer_metadata="now"),
        Tokenizing(ids=[]),
        Tokenizing(ids=[1, 64790]),
    ],
)
def test_each_kind_comes_back(request_document: Tokenizing) -> None:
    assert decode_tokenizing(encode_tokenizing(request_document)) == request_document


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"{}", "got none"),
        (b'{"text":"a","ids":[1]}', "text.*ids"),
        (b'{"messages":[]}', "messages"),
        (b'{"ids":[-1]}', "ids"),
        (b'{"ids":[1],"prefix":true}', "prefix"),
        (b'{"texts":["a"]}', "texts"),
    ],
)
def test_anything_but_exactly_one_is_refused(document: bytes, why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        decode_tokenizing(document)
