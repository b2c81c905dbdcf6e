"""The gateway's upstream in front of the real engine: what it hears is what the engine did."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.events import Accepted, Delta, Event
from gateway.core.request import Conversation, Generation, Message
from gateway.errors import ContextLengthError, InvalidRequestError
from gateway.triton.options import PoolOptions
from gateway.triton.pool import TritonUpstream
from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")


@pytest.fixture
async def upstream(up: UpProcess) -> AsyncIterator[TritonUpstream]:
    upstream = TritonUpstream([up.triton_grpc], PoolOptions(models=MODELS))
    await upstream.start()
    async with asyncio.timeout(30):
        while {card.id for card in upstream.models() if card.ready} != set(MODELS):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.02)
    yield upstream
    await upstream.close()


async def ask(upstream: TritonUpstream, model: str, **changes: Any) -> list[Event]:
    fields: dict[str, Any] = {
        "request_id": "upstream",
        "model": model,
        "prompt": Conversation((Message(role="user", content="你好"),)),
        "deadline": asyncio.get_running_loop().time() + 60,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return [event async for event in upstream.generate(Generation(**(fields | changes)))]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


@pytest.mark.parametrize("model", MODELS)
async def test_streamed_and_whole_answers_agree_and_every_token_is_counted_once(
    upstream: TritonUpstream, model: str
) -> None:
    streamed = await ask(upstream, model)
    whole = await ask(upstream, model, stream=False)
    assert text(streamed) == text(whole)
    for events in (streamed, whole):
        first, last = events[0], events[-1]
        assert isinstance(first, Accepted)
        assert isinstance(last, Delta)
        assert last.usage is not None
        assert last.finish_reason == "length"
        assert last.usage.completion_tokens == 12
        assert last.usage.prompt_tokens == first.prompt_tokens
        assert sum(event.tokens for event in events if isinstance(event, Delta)) == 12
    *counts, _ = (event for event in whole if isinstance(event, Delta))
    assert all(count.counts_only for count in counts)


async def test_logprobs_come_with_every_token_of_the_text(upstream: TritonUpstream) -> None:
    events = await ask(upstream, "chatglm3", logprobs=2)
    logprobs = [one for event in events if isinstance(event, Delta) for one in event.logprobs or ()]
    assert 0 < len(logprobs) <= 12
    assert all(len(one.top) == 2 and one.top[0].logprob == one.logprob for one in logprobs)


@pytest.mark.parametrize("model", MODELS)
async def test_the_engines_own_refusals(upstream: TritonUpstream, model: str) -> None:
    context = upstream.model(model).max_context
    assert context is not None
    with pytest.raises(ContextLengthError) as raised:
        await ask(upstream, model, max_tokens=context)
    assert str(context) in raised.value.message
    with pytest.raises(InvalidRequestError):
        await ask(upstream, model, stop_token_ids=(10**9,), logit_bias={10**9: 1.0})
