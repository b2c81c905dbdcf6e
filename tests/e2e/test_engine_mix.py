"""The engine's limits on the real Triton: two models at once, scarce KV memory, a list that really queues."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.channel_client import OpenedChannel, open_channel
from tests.e2e.long_answers import LONG
from tests.e2e.mix_server import (
    ANSWER,
    AT_ONCE,
    RUNNING,
    SHORT_TIMEOUT_S,
    WAITING,
    WANTED_BLOCKS,
    Mix,
)
from tests.e2e.up_process import wait_until
from wire.meta import Meta

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
async def sdk(mix: Mix) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=mix.gateway.base_url + "/v1", api_key="x", max_retries=0, timeout=100
    ) as client:
        yield client


URGENT = 99
"""Of the streams on the channel the first that is."""


async def until(holds: Any) -> None:
    await asyncio.to_thread(wait_until, holds)


async def written(mix: Mix, model: str) -> None:
    """Wait until the engine has written down what it counted: it did so twice since."""
    for _ in range(2):
        now = time.time()
        await until(lambda since=now: mix.count("heartbeat_timestamp_seconds", model=model) > since)


def asked(number: int, **options: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"第{number}个问题：{'天气' * (number % 5)}?"}],
        "max_tokens": 20 + number * 7 % 50,
        "temperature": (0, 0.7, 1.2)[number % 3],
        "seed": number,
        "extra_body": {"ignore_eos": True},
    } | options


async def answers(sdk: openai.AsyncOpenAI, model: str, requests: list[dict[str, Any]]) -> list[Any]:
    """Ask all at once."""
    return await asyncio.gather(*(sdk.chat.completions.create(model=model, **each) for each in requests))


async def keep_asking(sdk: openai.AsyncOpenAI, model: str, max_tokens: int) -> None:
    while True:
        await sdk.chat.completions.create(model=model, **asked(0, max_tokens=max_tokens))


def texts(completions: list[Any]) -> list[str]:
    return [each.choices[0].message.content for each in completions]


async def test_two_models_at_once_have_their_own_answers_and_their_own_counts(
    mix: Mix, sdk: openai.AsyncOpenAI
) -> None:
    models, requests = ("ample", "other"), [asked(number) for number in range(24)]
    alone = {model: texts(await answers(sdk, model, requests)) for model in models}
    assert alone["ample"] != alone["other"]
    counters = ("prompt_tokens_total", "generated_tokens_total", "requests_total")

    def counts() -> dict[str, list[float]]:
        return {model: [mix.count(name, model=model) for name in counters] for model in models}

    for model in models:
        await written(mix, model)
    before = counts()
    # A different load for each, or equal counts would say nothing.
    loads = {"ample": requests, "other": requests[:15]}
    together = dict(
        zip(
            models,
            await asyncio.gather(*(answers(sdk, model, loads[model]) for model in models)),
            strict=True,
        )
    )
    wanted = {}
    for model, completions in together.items():
        assert texts(completions) == alone[model][: len(completions)]
        usage = [each.usage for each in completions]
        added = (
            sum(each.prompt_tokens for each in usage),
            sum(each.completion_tokens for each in usage),
            len(usage),
        )
        wanted[model] = [old + new for old, new in zip(before[model], added, strict=True)]
    assert wanted["ample"] != wanted["other"]
    await until(lambda: counts() == wanted)
    await until(lambda: all(mix.idle(model) for model in models))


async def test_one_models_load_is_not_in_the_others_gauges(mix: Mix, sdk: openai.AsyncOpenAI) -> None:
    clients = [asyncio.create_task(keep_asking(sdk, "other", 450)) for _ in range(AT_ONCE + 8)]
    # All are of one length: where they end, the next have only begun.
    await until(
        lambda: (
            mix.count("requests_running", model="other") == AT_ONCE
            and mix.count("kv_blocks_used", model="other") >= AT_ONCE
        )
    )
    gauges = ("requests_running", "requests_waiting", "kv_blocks_used")
    assert [mix.count(name, model="ample") for name in gauges] == [0, 0, 0]
    await leave(clients)
    await until(lambda: mix.idle("other"))


async def test_a_quarter_of_the_memory_changes_nothing_but_the_time(
    mix: Mix, sdk: openai.AsyncOpenAI
) -> None:
    assert mix.count("kv_blocks", model="quarter") == WANTED_BLOCKS // 4
    requests = [asked(number, max_tokens=ANSWER, temperature=0) for number in range(2 * AT_ONCE)]
    enough = texts(await answers(sdk, "ample", requests))
    scarce = await answers(sdk, "quarter", requests)
    assert texts(scarce) == enough
    assert [each.usage.completion_tokens for each in scarce] == [ANSWER] * len(requests)
    await until(lambda: mix.count("preemptions_total", model="quarter") > 0)
    assert mix.count("preemptions_total", model="ample") == 0
    await until(lambda: mix.idle("quarter"))


async def test_one_more_than_the_waiting_list_holds_is_refused(mix: Mix, sdk: openai.AsyncOpenAI) -> None:
    bound, too_many = RUNNING + WAITING, 25
    refused: list[openai.RateLimitError] = []

    async def ask() -> None:
        try:
            await sdk.chat.completions.create(model="line", **asked(0, max_tokens=LONG))
        except openai.RateLimitError as error:
            refused.append(error)

    clients = [asyncio.create_task(ask()) for _ in range(bound + too_many)]
    await until(lambda: len(refused) == too_many)
    report = await asyncio.to_thread(mix.probe, "line")
    assert (report.running, report.waiting) == (RUNNING, WAITING)
    for error in refused:
        assert int(error.response.headers["retry-after"]) >= 1
        assert error.code == "rate_limit_exceeded"
    await leave(clients)
    await until(lambda: mix.idle("line"))
    await sdk.chat.completions.create(model="line", **asked(0))


async def test_who_waits_past_the_deadline_is_told_so(mix: Mix, sdk: openai.AsyncOpenAI) -> None:
    ended = mix.count("requests_total", model="line", finish_reason="deadline")
    clients = [asyncio.create_task(keep_asking(sdk, "line", LONG)) for _ in range(WAITING - 5)]
    await until(lambda: mix.probe("line").waiting > WAITING // 2)
    async with openai.AsyncOpenAI(
        base_url=mix.hasty.base_url + "/v1", api_key="x", max_retries=0, timeout=100
    ) as hasty:
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError) as late:
            await hasty.chat.completions.create(model="line", **asked(1))
        assert time.monotonic() - began >= SHORT_TIMEOUT_S
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        # Streamed, it was told 200 while it waited.
        stream = await hasty.chat.completions.create(model="line", **asked(1), stream=True)
        with pytest.raises(openai.APIError) as broken:
            [chunk async for chunk in stream]
        assert broken.value.code == "deadline_exceeded"
    # The engine itself gives up at the deadline, not who asked it; and this one's turn never comes.
    with pytest.raises(RuntimeError, match=r"^tritongate:deadline_exceeded:"):
        await asyncio.to_thread(mix.triton.ask, "line", "你好", deadline_ms=300, priority=100)
    await until(lambda: mix.count("requests_total", model="line", finish_reason="deadline") >= ended + 1)
    await leave(clients)
    await until(lambda: mix.idle("line"))


@pytest.fixture
def channel(mix: Mix) -> Iterator[OpenedChannel]:
    with contextlib.closing(open_channel(mix.triton, "line", "urgent")) as channel:
        yield channel
    wait_until(lambda: mix.idle("line"))


def test_an_urgent_request_overtakes_those_that_wait(mix: Mix, channel: OpenedChannel) -> None:
    """All on one delta channel: the order of its frames is the engine's, however late anybody reads them."""

    def stream(number: int, priority: int, tokens: int, temperature: float = 1) -> Iterator[tuple[str, Meta]]:
        place = {"id": "urgent", "stream": number}
        answer = mix.triton.stream(
            "line",
            "你好",
            priority=priority,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            channel=place,
        )
        assert next(answer)[1].accepted is not None
        return answer

    # So long that most wait yet when the last has come, so short that the urgent need not wait for ever.
    fillers = [stream(number, 2, LONG // 4) for number in range(WAITING - RUNNING)]
    for number in range(URGENT, URGENT + 5):
        urgent = stream(number, 1, 40, temperature=0)  # whose tokens, unlike some, each have text for a frame
        waiting = mix.probe("line").waiting
        *_, (_, last) = urgent
        # Where the machine is busy, delivery joins steps. An answer that is complete by then goes with its
        # last response, in no frame, and its place among the others cannot be seen.
        if last.delivered.deltas:
            break
    wait_until(lambda: channel.frames[-1].frame >= last.delivered.frame)
    began = list(dict.fromkeys(each for frame in channel.frames for each in frame.streams))
    before = [each for each in began[: began.index(number)] if each < URGENT]
    assert waiting >= 25  # on a busy machine some are through before the last has come
    # Those that ran were not stopped. All that waited after it had come, itself perhaps among them, began
    # after it, but for one in each slot, which may have been chosen before.
    assert len(fillers) - len(before) >= waiting - 1 - RUNNING


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_whoever_leaves_frees_everything_queued_or_not(
    mix: Mix, sdk: openai.AsyncOpenAI, phase: str
) -> None:
    def cancelled() -> float:
        return mix.count("requests_total", model="line", finish_reason="cancelled")

    await until(lambda: mix.idle("line"))
    await written(mix, "line")
    before = cancelled()
    # A long prompt, two tokens in a step, for one token: who runs is in prefill. Or it is at its answer.
    prompt, answer = (LONG, 1) if phase == "prefill" else (5, LONG)
    accepted = read = 0

    async def ask(number: int) -> None:
        nonlocal accepted, read
        stream = await sdk.completions.create(
            model="line",
            prompt=[300 + (number * 7 + place) % 500 for place in range(prompt)],
            max_tokens=answer,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        accepted += 1
        async for chunk in stream:
            read += bool(chunk.choices and chunk.choices[0].text)

    def under_way() -> bool:
        report = mix.probe("line")
        all_came = accepted == len(clients) and report.running > 0 and report.waiting > 0
        return all_came and (phase == "prefill" or read > 0)

    clients = [asyncio.create_task(ask(number)) for number in range(24)]
    await until(under_way)
    await leave(clients)
    await until(lambda: mix.idle("line"))
    await until(lambda: cancelled() == before + len(clients))


async def leave(clients: list[asyncio.Task[None]]) -> None:
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
