import json

import pytest

from gateway.core.upstream import Vector
from gateway.errors import InvalidRequestError
from gateway.openai.document import Reading
from gateway.openai.embeddings import EmbeddingsRequest, embeddings_answer


def read(**body: object) -> EmbeddingsRequest:
    return EmbeddingsRequest.model_validate({"model": "m", **body})


@pytest.mark.parametrize(("given", "count"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)])
def test_each_text_is_embedded(given: object, count: int) -> None:
    work = read(input=given, dimensions=8).embeddings(request_id="r", deadline=1.0)
    assert len(work) == count
    assert all((each.model, each.dimensions) == ("m", 8) for each in work)


@pytest.mark.parametrize("given", ['""', "[]", '[""]', "[[]]", "7"])
def test_nothing_cannot_be_embedded(given: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EmbeddingsRequest.read(b'{"model":"m","input":' + given.encode() + b"}")
    assert (caught.value.param or "").startswith("input")


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("add_special_tokens", False, True),
        ("embed_dtype", "float16", "float32"),
        ("normalize", False, True),
        ("truncate_prompt_tokens", 8, None),
    ],
)
def test_what_would_change_a_vector_is_refused(name: str, value: object, neutral: object) -> None:
    def read_body(given: object) -> EmbeddingsRequest:
        body = json.dumps({"model": "m", "input": "a", name: given})
        return EmbeddingsRequest.read(body.encode(), Reading())

    read_body(neutral)
    with pytest.raises(InvalidRequestError, match=f"The parameter {name} is not supported") as caught:
        read_body(value)
    assert caught.value.param == name


def test_base64_has_one_endianness() -> None:
    assert [read(input="a", endianness=each).endianness for each in ("native", "little", None)]
    with pytest.raises(InvalidRequestError) as caught:
        EmbeddingsRequest.read(b'{"model":"m","input":"a","endianness":"big"}')
    assert caught.value.param == "endianness"


def test_vectors_are_written_as_asked() -> None:
    vectors = [Vector(values=[1.0, -0.5], tokens=3), Vector(values=[0.0, 2.0], tokens=4)]
    answer = embeddings_answer(read(input=["a", "b"]), vectors)
    assert [each.embedding for each in answer.data] == [[1.0, -0.5], [0.0, 2.0]]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)
    packed = embeddings_answer(read(input=["a", "b"], encoding_format="base64"), vectors)
    assert packed.data[0].embedding == "AACAPwAAAL8="
