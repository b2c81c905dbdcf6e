import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.errors import DeadlineError, InvalidRequestError, UnavailableError, UpstreamProtocolError
from gateway.generation import PlainText
from gateway.tokenization import Tokenization
from tests.gateway.triton.fake_triton import Response, hanging, losing, refusing, reply, until
from wire.refusal import RefusalCode, refusal_text


def tokenization(*, time_s: float = 30) -> Tokenization:
    deadline = asyncio.get_running_loop().time() + time_s
    return Tokenization(request_id="req-1", model="m", prompt=PlainText("hi"), deadline=deadline)


async def test_the_models_own_entry_counts(triton: Any, serve: Any, observer: Any) -> None:
    pool = await serve(triton)
    assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
    assert triton.metadata[-1]["x-request-id"] == "req-1"
    assert triton.requests[-1].model_name == "m"
    assert observer.errors == []


async def test_its_refusal_is_the_clients_and_nonsense_the_models(triton: Any, serve: Any) -> None:
    async def twice(request: Any, context: Any) -> AsyncIterator[Response]:
        yield reply()
        yield reply(final=True)

    pool = await serve(triton)
    triton.model.tokenize = refusing(refusal_text(RefusalCode.INVALID_REQUEST, "no such id"))
    with pytest.raises(InvalidRequestError, match="no such id"):
        await pool.tokenize(tokenization())
    triton.model.tokenize = twice
    with pytest.raises(UpstreamProtocolError):
        await pool.tokenize(tokenization())


async def test_it_ends_with_its_deadline_and_is_cancelled_then(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.model.tokenize = hanging()
    with pytest.raises(DeadlineError):
        await pool.tokenize(tokenization(time_s=1))
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    with pytest.raises(DeadlineError):
        await pool.tokenize(tokenization(time_s=-1))


async def test_another_backend_is_tried_where_one_fails(tritons: Any, serve: Any) -> None:
    broken, well = await tritons(), await tritons()
    pool = await serve(broken, well)
    broken.model.tokenize = losing()
    for _ in range(2):
        assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
        await until(lambda: all(replica.state == "ready" for replica in pool.replicas()))
    well.model.tokenize = losing()
    with pytest.raises(UnavailableError):
        await pool.tokenize(tokenization())
