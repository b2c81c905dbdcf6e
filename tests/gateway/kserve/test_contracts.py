from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.kserve.history import Shape
from gateway.kserve.contracts import Ask, read_ask
from triton_models.signatures import Contract, choose_contract, field_signature
from wire.history import Turn

STRINGS: dict[str, list[Any]] = {
    "prompt": ["你好".encode()],
    "history": [b""],
    "temperature": [b"0.3"],
    "max_token": [b"1024"],
}


def read(contract: Contract = Contract.BATCHED, chat_format: str = "chatglm3", **changes: list[Any]) -> Ask:
    row = STRINGS | changes
    if contract is Contract.UNBATCHED:
        row = row | {"max_token": [1024], "history_len": [2]} | changes
    if contract is Contract.CHATGLM2:
        row = row | {"history": [], "history_len": [b"2"]} | changes
    return read_ask(contract, row, chat_format)


@pytest.mark.parametrize("contract", Contract)
def test_the_same_question_in_each_contract(contract: Contract) -> None:
    ask = read(contract)
    assert (ask.prompt, ask.temperature, ask.max_total_tokens, ask.history.turns) == ("你好", 0.3, 1024, [])


def test_an_empty_history_takes_the_checkpoints_shape() -> None:
    assert read().history.shape is Shape.OBJECTS
    assert read(chat_format="chatglm2").history.shape is Shape.PAIRS
    assert read(Contract.CHATGLM2).history.shape is Shape.FLAT


def test_how_much_history_counts() -> None:
    objects = str([{"role": role, "content": f"{n}"} for n in range(8) for role in ("user", "assistant")])
    assert len(read(history=[objects.encode()]).history.items) == 10
    assert len(read(history=[objects.encode()], history_len=[b"3"]).history.items) == 6
    assert len(read(Contract.UNBATCHED, history=[objects.encode()]).history.items) == 4
    flat = [b"q1", b"a1", b"q2", b"a2", b"q3", b"a3"]
    assert read(Contract.CHATGLM2, history=flat).history.turns == [
        Turn(role, text)
        for text, role in (("q2", "user"), ("a2", "assistant"), ("q3", "user"), ("a3", "assistant"))
    ]
    for contract, none in ((Contract.UNBATCHED, 0), (Contract.CHATGLM2, b"0")):
        given = [objects.encode()] if contract is Contract.UNBATCHED else flat
        assert read(contract, history=given, history_len=[none]).history.items == ()


@pytest.mark.parametrize(
    ("text", "value"), [(b"0", 0), (b"2", 2), (b" 0.95 ", 0.95), (b"1e-05", 1e-5), (b"2.0", 2), (b"1E+0", 1)]
)
def test_temperatures(text: bytes, value: float) -> None:
    assert read(temperature=[text]).temperature == value


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"2.01",
        b"-0.1",
        b"+1",
        b"nan",
        b"inf",
        b"1e9",
        b"0x1",
        b"1_0",
        b".5",
        b"0,5",
        "٣".encode(),
        b"\xff",
        b"1" * 99,
    ],
)
def test_what_is_no_temperature_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="temperature must be a decimal number from 0 to 2"):
        read(temperature=[text])


@pytest.mark.parametrize("text", [b"", b"0", b"-1", b"1.0", b"1e3", b"many", b"1" * 10])
def test_what_is_no_length_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="max_token must be a whole number of at least 1"):
        read(max_token=[text])
    with pytest.raises(InvalidRequestError, match="history_len"):
        read(Contract.CHATGLM2, history_len=[text if text != b"0" else b"00x"])


@pytest.mark.parametrize("field", ["max_token", "history_len"])
def test_an_int16_that_wrapped_around_is_explained(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{field} must .* not -25536 \(INT16 ends at 32767"):
        read(Contract.UNBATCHED, **{field: [40000 - 2**16]})


@pytest.mark.parametrize(
    ("field", "values"), [("prompt", [b"\xff"]), ("prompt", []), ("prompt", [b"a", b"b"])]
)
def test_what_is_no_prompt_is_refused(field: str, values: list[bytes]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        read(**{field: values})


def test_the_contract_is_chosen_or_follows_from_the_format() -> None:
    assert choose_contract(None, "chatglm2") is Contract.CHATGLM2
    assert choose_contract(None, "chatglm3") is choose_contract(None, None) is Contract.BATCHED
    assert choose_contract("unbatched", "chatglm2") is Contract.UNBATCHED
    with pytest.raises(ValueError, match="batched, unbatched, chatglm2"):
        choose_contract("v2", None)
    assert {each.name for each in field_signature(Contract.UNBATCHED).outputs} == {"response", "history"}
