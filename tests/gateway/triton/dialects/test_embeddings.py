import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tritonclient.grpc import service_pb2

from gateway.core.request import PlainText, TokenIds
from gateway.core.upstream import Embedding
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects import Dialects
from gateway.triton.dialects.base import Embedder


def metadata(
    output: str = "sentence_embedding", datatype: str = "FP32", inputs: tuple[str, ...] = ("TEXT",)
) -> service_pb2.ModelMetadataResponse:
    made = service_pb2.ModelMetadataResponse(name="m")
    for name in inputs:
        made.inputs.add(name=name, datatype="BYTES", shape=[-1, 1])
    made.outputs.add(name=output, datatype=datatype, shape=[-1, 3])
    return made


@pytest.fixture
def embedder(tmp_path: Path) -> Embedder:
    """Of a plain model; its tokens are words, and it has no chat template."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = Dialects([f"m={tmp_path}"]).of("m", metadata()).embedder
    assert found is not None
    return found


def embedding(**changes: Any) -> Embedding:
    fields: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "prompt": PlainText("one two"),
        "deadline": 0.0,
    }
    return Embedding(**(fields | changes))


def vectors(*shape: int) -> service_pb2.ModelInferResponse:
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="sentence_embedding", datatype="FP32", shape=shape)
    response.raw_output_contents.append(struct.pack("<6f", 1, 2, 3, 4, 5, 6))
    return response


def test_a_text_goes_in_and_a_vector_comes_out(embedder: Embedder) -> None:
    message = embedder.request(embedding())
    assert [(each.name, list(each.shape)) for each in message.inputs] == [("TEXT", [1, 1])]
    vector = embedder.read(embedding(), [vectors(1, 6)])
    assert (vector.values, vector.tokens) == ([1, 2, 3, 4, 5, 6], 2)


def test_a_vector_for_each_token_is_none_of_the_text(embedder: Embedder) -> None:
    with pytest.raises(UpstreamProtocolError, match="not one vector"):
        embedder.read(embedding(), [vectors(1, 2, 3)])


@pytest.mark.parametrize(("field", "value"), [("prompt", TokenIds((1,))), ("dimensions", 3)])
def test_what_a_plain_model_cannot_do(embedder: Embedder, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        embedder.request(embedding(**{field: value}))
    assert caught.value.param == {"prompt": "input"}.get(field, field)


def test_its_tokens_must_be_counted() -> None:
    with pytest.raises(UpstreamProtocolError, match="set `tokenizers` to m=FOLDER"):
        Dialects().of("m", metadata())


@pytest.mark.parametrize(
    "other", [metadata("scores"), metadata(datatype="INT64"), metadata(inputs=("TEXT", "LANGUAGE"))]
)
def test_other_models_are_not_taken_for_one(other: service_pb2.ModelMetadataResponse) -> None:
    with pytest.raises(UpstreamProtocolError, match="no tensor contract"):
        Dialects().of("m", other)
