import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import InvalidRequestError, UnavailableError, UpstreamProtocolError
from gateway.generation import PlainText
from gateway.tokenization import Tokenization
from tests.gateway.triton.fake_triton import FakeModel
from wire.refusal import RefusalCode, refusal_text
from wire.strings import pack_strings


def tokenization() -> Tokenization:
    deadline = asyncio.get_running_loop().time() + 30
    return Tokenization(request_id="req-1", model="m", prompt=PlainText("hi"), deadline=deadline)


def entry(predict: Any) -> FakeModel:
    return FakeModel(inputs=("request",), shape=(1,), predict=predict)


async def two_ids(request: Any, context: Any) -> Any:
    answer = service_pb2.ModelInferResponse(model_name=request.model_name)
    for name, raw in (("input_ids", bytes(8) + b"\x05" + bytes(7)), ("text", pack_strings([b"hi"]))):
        answer.outputs.add(name=name)
        answer.raw_output_contents.append(raw)
    return answer


async def test_the_tokenizers_entry_is_asked(triton: Any, serve: Any, observer: Any) -> None:
    pool = await serve(triton)
    triton.models["m-tokenizer"] = entry(two_ids)
    assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
    assert triton.metadata[-1]["x-request-id"] == "req-1"
    assert observer.errors == []


async def test_its_refusal_is_the_clients_and_nonsense_the_models(triton: Any, serve: Any) -> None:
    async def refuse(request: Any, context: Any) -> Any:
        text = refusal_text(RefusalCode.INVALID_REQUEST, "no such id")
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)

    async def nothing(request: Any, context: Any) -> Any:
        return service_pb2.ModelInferResponse(model_name=request.model_name)

    pool = await serve(triton)
    triton.models["m-tokenizer"] = entry(refuse)
    with pytest.raises(InvalidRequestError, match="no such id"):
        await pool.tokenize(tokenization())
    triton.models["m-tokenizer"] = entry(nothing)
    with pytest.raises(UpstreamProtocolError):
        await pool.tokenize(tokenization())


async def test_another_replica_is_asked_where_one_has_no_tokenizer(tritons: Any, serve: Any) -> None:
    bare, whole = await tritons(), await tritons()
    pool = await serve(bare, whole)
    whole.models["m-tokenizer"] = entry(two_ids)
    for _ in range(2):
        assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
    del whole.models["m-tokenizer"]
    with pytest.raises(UnavailableError):
        await pool.tokenize(tokenization())
