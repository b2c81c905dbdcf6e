import msgspec
import pytest

from wire.history import Turn, decode_history, encode_history


def test_history_comes_back() -> None:
    turns = [
        Turn("system", "s", tools=[{"name": "f", "parameters": {"b": 1, "a": [None, 1.5]}}]),
        Turn("user", "天气?"),
        Turn("assistant", "code", metadata="f"),
        Turn("observation", "21"),
    ]
    assert decode_history(encode_history(turns)) == turns


def test_defaults_stay_unsaid_and_keys_keep_their_order() -> None:
    tools = [{"name": "f", "a": 1}]
    assert encode_history([Turn("user", "你")]) == '[{"role":"user","content":"你"}]'.encode()
    assert b'"tools":[{"name":"f","a":1}]' in encode_history([Turn("system", "", tools=tools)])


def test_nothing_is_an_empty_history() -> None:
    assert decode_history(b"") == decode_history(b"[]") == []


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (b'[{"role":"tool","content":""}]', "role"),
        (b'[{"role":"user","content":""},{"role":"user"}]', r"\[1\]"),
        (b'[{"role":"user","content":"","name":"x"}]', "name"),
        (b'[{"role":"user","content":null}]', "content"),
        (b'[["q","a"]]', r"\[0\]"),
        (b'{"role":"user","content":""}', "array"),
    ],
)
def test_anything_but_role_objects_is_refused_by_path(document: bytes, where: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=where):
        decode_history(document)


@pytest.mark.parametrize("document", [b"[{'role': 'user', 'content': ''}]", b"[", b"\xff"])
def test_what_is_not_json_is_refused(document: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_history(document)
