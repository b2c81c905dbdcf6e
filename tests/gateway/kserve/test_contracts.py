import struct
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.kserve.contracts import (
    SIGNATURES,
    InferRequest,
    Question,
    Tensor,
    config_document,
    contract_of,
    metadata_document,
    read_question,
    read_questions,
    write_outputs,
)
from gateway.kserve.history import Reply, Shape
from gateway.settings.values import Contract
from wire.history import Turn
from wire.strings import pack_strings

STRINGS: dict[str, list[Any]] = {
    "prompt": ["你好".encode()],
    "history": [b""],
    "temperature": [b"0.3"],
    "max_token": [b"1024"],
}


def read(
    contract: Contract = Contract.BATCHED, chat_format: str = "chatglm3", **changes: list[Any]
) -> Question:
    row = STRINGS | changes
    if contract is Contract.UNBATCHED:
        row = row | {"max_token": [1024], "history_len": [2]} | changes
    if contract is Contract.FLAT:
        row = row | {"history": [], "history_len": [b"2"]} | changes
    return read_question(contract, row, chat_format)


@pytest.mark.parametrize("contract", SIGNATURES)
def test_the_same_question_in_each_contract(contract: Contract) -> None:
    ask = read(contract)
    assert (ask.prompt, ask.temperature, ask.max_total_tokens, ask.history.turns) == ("你好", 0.3, 1024, ())


def test_an_empty_history_takes_the_checkpoints_shape() -> None:
    assert read().history.shape is Shape.OBJECTS
    assert read(chat_format="chatglm2").history.shape is Shape.PAIRS
    assert read(Contract.FLAT).history.shape is Shape.FLAT


def test_how_much_history_counts() -> None:
    objects = str([{"role": role, "content": f"{n}"} for n in range(8) for role in ("user", "assistant")])
    assert len(read(history=[objects.encode()]).history.items) == 10
    assert len(read(history=[objects.encode()], history_len=[b"3"]).history.items) == 6
    assert len(read(Contract.UNBATCHED, history=[objects.encode()]).history.items) == 4
    flat = [b"q1", b"a1", b"q2", b"a2", b"q3", b"a3"]
    assert read(Contract.FLAT, history=flat).history.turns == tuple(
        Turn(role, text)
        for text, role in (("q2", "user"), ("a2", "assistant"), ("q3", "user"), ("a3", "assistant"))
    )
    for contract, none in ((Contract.UNBATCHED, 0), (Contract.FLAT, b"0")):
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
        read(Contract.FLAT, history_len=[text if text != b"0" else b"00x"])


@pytest.mark.parametrize("field", ["max_token", "history_len"])
def test_an_int16_that_wrapped_around_is_explained(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{field} must .* not -25536 \(INT16 ends at 32767"):
        read(Contract.UNBATCHED, **{field: [40000 - 2**16]})


def test_a_prompt_is_text() -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        read(prompt=[b"\xff"])


def test_the_contract_follows_from_the_format() -> None:
    assert contract_of("chatglm2") is Contract.FLAT
    assert contract_of("chatglm3") is contract_of(None) is Contract.BATCHED
    assert {each.name for each in SIGNATURES[Contract.UNBATCHED].outputs} == {"response", "history"}


def string(name: str, *values: str, shape: tuple[int, ...] = (1, 1)) -> Tensor:
    return Tensor.read(name, "BYTES", shape, values, path="inputs.0", at="data")


def asked(*rows: dict[str, str], shape: tuple[int, ...] | None = None, **changes: Any) -> InferRequest:
    """A request of contract 1 with these rows, whose defaults are those of `STRINGS`."""
    inputs = [
        string(
            name,
            *(row.get(name, value[0].decode()) for row in rows or ({},)),
            shape=shape or (len(rows) or 1, 1),
        )
        for name, value in STRINGS.items()
    ]
    return InferRequest(**({"model": "m", "inputs": inputs} | changes))


def refusal(request: InferRequest, contract: Contract = Contract.BATCHED) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequestError) as raised:
        read_questions(contract, request, "chatglm3")
    return raised.value.param, raised.value.message


def test_rows_are_read_each_by_itself() -> None:
    request = asked({"prompt": "a", "max_token": "5"}, {"prompt": "b", "temperature": "0"})
    questions, batch_dimension = read_questions(Contract.BATCHED, request, "chatglm3")
    assert batch_dimension
    assert [(each.prompt, each.temperature, each.max_total_tokens) for each in questions] == [
        ("a", 0.3, 5),
        ("b", 0.0, 1024),
    ]


def test_the_batch_dimension_may_be_left_out() -> None:
    questions, batch_dimension = read_questions(Contract.BATCHED, asked(shape=(-1,)), "chatglm3")
    assert (len(questions), batch_dimension) == (1, False)
    pairs = [(questions[0], Reply("r", (Turn("assistant", "r"),)))]
    (response, history) = write_outputs(Contract.BATCHED, asked(), pairs, batch_dimension=False)
    assert (response.shape, history.shape) == ((1,), (1,))
    assert read_questions(Contract.BATCHED, asked(), "chatglm3")[1]
    (response, _) = write_outputs(Contract.BATCHED, asked(), pairs, batch_dimension=True)
    assert response.shape == (1, 1)


def test_a_wrong_row_is_named() -> None:
    assert refusal(asked({}, {"temperature": "hot"}))[1].startswith("row 1: temperature must be")
    assert refusal(asked({"temperature": "hot"}))[1].startswith("temperature must be")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        (lambda inputs: inputs[:3], "inputs", "max_token missing"),
        (lambda inputs: [*inputs, string("surprise", "x")], "inputs.4.name", "no input 'surprise'; it has"),
        (lambda inputs: [*inputs, inputs[0]], "inputs.4.name", "twice"),
        (lambda inputs: [string("prompt", "a", "b", shape=(2, 1)), *inputs[1:]], "inputs", "of rows"),
        (lambda inputs: [string("prompt", "a", "b", shape=(1, 2)), *inputs[1:]], "inputs.0.shape", "[1, 2]"),
        (lambda inputs: [string("prompt", "a", "b", shape=(2,)), *inputs[1:]], "inputs.0.shape", "[2]"),
        (lambda inputs: [string("prompt", "a", shape=(1, 1, 1)), *inputs[1:]], "inputs.0.shape", "[-1, 1]"),
        (lambda inputs: [string("prompt", "a", shape=()), *inputs[1:]], "inputs.0.shape", "[]"),
        (
            lambda inputs: [Tensor("prompt", "INT16", (1, 1), [1]), *inputs[1:]],
            "inputs.0.datatype",
            "prompt is BYTES, not 'INT16'",
        ),
    ],
)
def test_tensors_of_another_contract_are_refused(change: Any, param: str, words: str) -> None:
    request = asked()
    found = refusal(asked(inputs=change(request.inputs)))
    assert found[0] == param
    assert words in found[1]


def test_as_many_rows_as_a_batch_has_and_no_output_that_is_not_there() -> None:
    assert len(read_questions(Contract.BATCHED, asked(*[{}] * 64), "chatglm3")[0]) == 64
    assert "1 to 64 rows" in refusal(asked(*[{}] * 65))[1]
    assert "1 to 64 rows" in refusal(asked(inputs=[string(name, shape=(0, 1)) for name in STRINGS]))[1]
    assert refusal(asked(outputs=["response", "logits"]))[0] == "outputs.1.name"
    assert "batch" not in refusal(asked(), Contract.FLAT)[1]


@pytest.mark.parametrize(
    ("shape", "count", "complete"), [([-1], 3, (3,)), ([-1], 0, (0,)), ([1, -1], 2, (1, 2)), ([], 1, ())]
)
def test_a_size_left_open_is_the_count(shape: list[int], count: int, complete: tuple[int, ...]) -> None:
    assert Tensor.read("t", "BYTES", shape, ["x"] * count, path="p", at="data").shape == complete


@pytest.mark.parametrize(
    ("datatype", "shape", "elements", "param"),
    [
        ("BYTES", [2], ["a"], "p.shape"),
        ("BYTES", [2, -1], ["a"], "p.shape"),
        ("BYTES", [-1, -1], ["a"], "p.shape"),
        ("BYTES", [0, -1], ["a"], "p.shape"),
        ("BYTES", [-2], ["a"], "p.shape"),
        ("BYTES", [2**62] * 8, ["a"], "p.shape"),
        ("BYTES", [1] * 9, ["a"], "p.shape"),
        ("BYTES", [1], [1], "p.data.0"),
        ("BYTES", [1], [None], "p.data.0"),
        ("BYTES", [2], ["a", "\ud800"], "p.data.1"),
        ("BYTES", [1], b"\1\0\0", "p.data"),
        ("BYTES", [1], b"\7\0\0\0a", "p.data"),
        ("BYTES", [1], pack_strings([b"a", b"b"]), "p.shape"),
        ("BYTES", [2**62] * 8, pack_strings([b"a"]), "p.shape"),
        ("INT16", [1], [40000], "p.data.0"),
        ("INT16", [1], [True], "p.data.0"),
        ("INT16", [1], [1.0], "p.data.0"),
        ("INT16", [1], ["1"], "p.data.0"),
        ("INT16", [1], b"\1", "p.data"),
        ("INT16", [1], b"\1\0\1\0", "p.shape"),
        ("FP32", [1], [1.0], "p.datatype"),
    ],
)
def test_elements_that_do_not_suit_are_refused(
    datatype: str, shape: list[int], elements: Any, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        Tensor.read("t", datatype, shape, elements, path="p", at="data")
    assert raised.value.param == param
    assert param in raised.value.message


def test_serialised_elements_are_read() -> None:
    packed = pack_strings(["你".encode(), b""])
    assert Tensor.read("t", "BYTES", [2], packed, path="p", at="data").values == ["你".encode(), b""]
    assert Tensor.read("t", "BYTES", [-1], packed, path="p", at="data").shape == (2,)
    assert Tensor.read("t", "INT16", [2], b"\1\0\xff\xff", path="p", at="data").values == [1, -1]
    eight = struct.pack("<2q", 2**62, -1)
    assert Tensor.read("t", "INT64", [2], eight, path="p", at="data").values == [2**62, -1]
    for datatype in ("INT16", "INT64"):
        with pytest.raises(InvalidRequestError, match="3 bytes are no elements"):
            Tensor.read("t", datatype, [-1], b"abc", path="p", at="data")


def test_outputs_are_serialised_by_their_datatype() -> None:
    assert Tensor("t", "INT64", (2,), [1, -2]).packed() == struct.pack("<2q", 1, -2)
    numbers = struct.pack("<2f", 0.5, -1.0)
    assert Tensor("t", "FP32", (2,), memoryview(numbers).cast("f")).packed() == numbers
    assert Tensor("t", "BYTES", (1,), [b"a"]).packed() == b"\1\0\0\0a"


@pytest.mark.parametrize("contract", SIGNATURES)
def test_each_contract_describes_its_tensors(contract: Contract) -> None:
    signature = SIGNATURES[contract]
    metadata, config = metadata_document("m", signature), config_document("m", signature)
    shapes = {each["name"]: (each["datatype"], each["shape"]) for each in metadata["inputs"]}
    expected = {
        Contract.BATCHED: {"prompt": ("BYTES", [-1, 1]), "max_token": ("BYTES", [-1, 1])},
        Contract.UNBATCHED: {"history": ("BYTES", [1]), "history_len": ("INT16", [1])},
        Contract.FLAT: {"history": ("BYTES", [-1]), "history_len": ("BYTES", [1])},
    }
    assert expected[contract].items() <= shapes.items()
    assert [each["name"] for each in config["input"]] == list(shapes)
    assert config["max_batch_size"] == (64 if contract is Contract.BATCHED else 0)
    assert [each["data_type"] for each in config["output"]] == ["TYPE_STRING", "TYPE_STRING"]
