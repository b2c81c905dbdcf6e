import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from gateway.core.batch import choices_apart, together
from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Heartbeat,
    Usage,
)
from gateway.core.request import Generation, PlainText
from gateway.errors import (
    ContextLengthError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UpstreamProtocolError,
)
from tests.gateway.serving import until

TWO_CHOICES = Generation(request_id="r", model="m", prompt=PlainText("0"), deadline=0, n=2)


def asked(count: int) -> list[Generation]:
    return [
        replace(TWO_CHOICES, prompt=PlainText(str(place)), prompt_field=f"prompt.{place}")
        for place in range(count)
    ]


def place_of(generation: Generation) -> int:
    assert isinstance(generation.prompt, PlainText)
    return int(generation.prompt.text)


class Script:
    """Prompt p has p + 1 tokens and two choices of one token; `wait` holds a prompt back, `fail` ends it."""

    def __init__(self) -> None:
        self.running = 0
        self.gates: dict[int, asyncio.Event] = {}
        self.errors: dict[int, Exception] = {}
        self.late_errors: dict[int, Exception] = {}

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        place = place_of(generation)
        self.running += 1
        try:
            if place in self.gates:
                await self.gates[place].wait()
            if place in self.errors:
                raise self.errors[place]
            yield Accepted(prompt_tokens=place + 1, prompt_token_ids=((place,),))
            yield Heartbeat()
            yield Delta(pieces=(f"{place}.1",), tokens=1, index=1, finish_reason="stop")
            if place in self.late_errors:
                raise self.late_errors[place]
            usage = Usage(prompt_tokens=place + 1, completion_tokens=2, cached_tokens=1)
            yield Delta(pieces=(f"{place}.0",), tokens=1, finish_reason="length", usage=usage)
        finally:
            self.running -= 1


async def test_they_are_told_as_one() -> None:
    script = Script()
    async with aclosing(together(script.generate, asked(3))) as source:
        first, *others = [event async for event in source]
    assert first == Accepted(prompt_tokens=6, prompt_token_ids=((0,), (1,), (2,)))
    deltas = [event for event in others if isinstance(event, Delta)]
    assert sorted((delta.index, delta.text) for delta in deltas) == [
        (2 * place + choice, f"{place}.{choice}") for place in range(3) for choice in range(2)
    ]
    assert [delta.usage for delta in deltas[:-1]] == [None] * 5
    assert deltas[-1].usage == Usage(prompt_tokens=6, completion_tokens=6, cached_tokens=3)
    assert sum(isinstance(event, Heartbeat) for event in others) == 3
    assert script.running == 0


async def test_nothing_is_told_before_all_are_accepted() -> None:
    script = Script()
    script.gates[1] = asyncio.Event()
    async with aclosing(together(script.generate, asked(2))) as source:
        first = asyncio.ensure_future(anext(source))
        await until(lambda: script.running == 2)
        await asyncio.sleep(0.02)
        assert not first.done()
        script.gates[1].set()
        assert isinstance(await first, Accepted)
        assert len([event async for event in source]) == 6


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("error", "param"),
    [
        (ContextLengthError("too long"), "prompt.1"),
        (InvalidRequestError("no", param="stop"), "stop"),
        (RateLimitError("full", reason="queue_full"), None),
        (RuntimeError("a bug"), None),
    ],
)
async def test_the_first_error_ends_all_and_names_its_prompt(
    late: bool, error: Exception, param: str | None
) -> None:
    script = Script()
    script.gates[2] = asyncio.Event()
    if late:
        script.gates[2].set()
    (script.late_errors if late else script.errors)[1] = error
    with pytest.raises(type(error)) as failed:
        async for _ in together(script.generate, asked(3)):
            pass
    assert script.running == 0
    if isinstance(failed.value, GatewayError):
        assert failed.value.param == param
        assert failed.value.reason == getattr(error, "reason", None)  # which the log's line has
        if param == "prompt.1":
            assert failed.value.message == "prompt.1: too long"


@pytest.mark.parametrize("events", [0, 1, 3])
async def test_closing_it_ends_all(events: int) -> None:
    script = Script()
    script.gates[1] = asyncio.Event()
    if events:
        script.gates[1].set()
    source = together(script.generate, asked(2))
    for _ in range(events):
        await anext(source)
    if not events:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(source), 0.02)
    await source.aclose()
    assert script.running == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_does_not_read_holds_all_back() -> None:
    produced = 0

    async def endless(_generation: Generation) -> AsyncGenerator[Event, None]:
        nonlocal produced
        yield Accepted(prompt_tokens=1)
        while True:
            produced += 1
            yield Delta(pieces=("a",), tokens=1)

    async with aclosing(together(endless, asked(2))) as source:
        for _ in range(10):
            await anext(source)
        await asyncio.sleep(0.02)
        assert produced <= 10 + 4


class Choices:
    """Answers of one token of reasoning and one of text, to a prompt of three, of which some are cached."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.error: Exception | None = None
        self.running = 0

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        assert generation.n == 1
        place = len(self.seeds)
        self.seeds.append(generation.seed)
        self.running += 1
        try:
            if place in self.gates:
                await self.gates[place].wait()
            if place and self.error is not None:
                raise self.error
            yield Accepted(prompt_tokens=3)
            yield Delta(pieces=(str(place),), tokens=1)
            usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2 * place, reasoning_tokens=1)
            yield Delta(tokens=1, finish_reason="stop", usage=usage)
        finally:
            self.running -= 1


async def test_choices_apart_are_told_as_those_of_one_generation() -> None:
    script = Choices()
    async with aclosing(choices_apart(script.generate, replace(TWO_CHOICES, n=3, seed=2**63 - 1))) as source:
        first, *others = [event async for event in source]
    assert script.seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert first == Accepted(prompt_tokens=3)
    deltas = [event for event in others if isinstance(event, Delta)]
    assert sorted((delta.index, delta.text) for delta in deltas if delta.text) == [
        (0, "0"),
        (1, "1"),
        (2, "2"),
    ]
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
    assert [delta.usage for delta in deltas[:-1]] == [None] * 5
    assert deltas[-1].usage == Usage(prompt_tokens=3, completion_tokens=6, reasoning_tokens=3)


async def test_a_choice_does_not_wait_for_another() -> None:
    script = Choices()
    script.gates[1] = asyncio.Event()
    async with aclosing(choices_apart(script.generate, TWO_CHOICES)) as source:
        told = [await anext(source) for _ in range(3)]
        assert [type(event) for event in told] == [Accepted, Delta, Delta]
        script.gates[1].set()
        assert [event.index async for event in source if isinstance(event, Delta)] == [1, 1]
    assert script.seeds == [None, None]


async def test_the_first_error_of_a_choice_ends_all() -> None:
    script = Choices()
    script.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        async for _ in choices_apart(script.generate, TWO_CHOICES):
            pass
    assert script.running == 0


async def test_a_cancellation_out_of_a_source_ends_all_at_once() -> None:
    async def cut(generation: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        if place_of(generation) == 1:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    async with asyncio.timeout(30), aclosing(together(cut, asked(2))) as source:
        with pytest.raises(UpstreamProtocolError, match="cut off"):
            _ = [event async for event in source]
