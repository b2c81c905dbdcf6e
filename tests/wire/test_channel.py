import msgspec
import pytest

from wire.channel import Frame, decode_frame, encode_frame
from wire.meta import Meta, encode_meta

FULL = Frame(
    frame=7,
    streams=[3, 2**40],
    tokens=[1, 4],
    texts=["你", ""],
    ids=[[9], [5, 6, 7, 8]],
    metas={1: msgspec.Raw(encode_meta(Meta(token_ids=[5])))},
)


def test_every_field_comes_back() -> None:
    assert decode_frame(encode_frame(FULL)) == FULL
    said = msgspec.json.decode(encode_frame(FULL))
    assert set(said) == {field.name for field in msgspec.structs.fields(Frame)} - {"v"}


def test_a_heartbeat_is_its_number() -> None:
    assert encode_frame(Frame(frame=3)) == b'{"frame":3}'
    assert decode_frame(b'{"v":1,"frame":3}') == Frame(frame=3)


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (b"{}", "frame"),
        (b'{"frame":-1}', "frame"),
        (b'{"frame":1,"v":2}', r"\$\.v"),
        (b'{"frame":1,"news":[]}', "news"),
        (b'{"frame":1,"streams":[1]}', "length"),
        (b'{"frame":1,"streams":[1],"tokens":[1],"texts":[]}', "length"),
        (b'{"frame":1,"streams":[1],"tokens":[1],"texts":[1]}', "texts"),
        (b'{"frame":1,"streams":[1,2],"tokens":[1,1],"texts":["",""],"ids":[[1]]}', "length"),
        (b'{"frame":1,"streams":[1],"tokens":[1],"texts":[""],"metas":{"1":{}}}', "metas"),
        (b'{"frame":1,"streams":[1],"tokens":[1],"texts":[""],"metas":{"-1":{}}}', "metas"),
    ],
)
def test_what_is_no_frame_is_refused(document: bytes, where: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=where):
        decode_frame(document)


def test_what_is_not_utf_8_is_no_frame() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_frame(b'{"frame":1,"te\xf8ts":[]}')
