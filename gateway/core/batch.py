"""Several prompts of one request, or several answers to one, run concurrently and merged into one stream.

Each is a separate generation for the upstream. The merged stream follows the rules of a single one: one
`Accepted`, deltas in order of arrival, and the usage with the very last one. Knows nothing of JSON or
tensors.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from msgspec import structs

from gateway.core.events import Accepted, Delta, Event, Heartbeat, Usage
from gateway.core.request import Generation
from gateway.errors import GatewayError, InvalidRequestError, UpstreamProtocolError

Generate = Callable[[Generation], AsyncGenerator[Event, None]]
"""As `gateway.core.upstream.Upstream.generate`."""


async def together(generate: Generate, generations: Sequence[Generation]) -> AsyncGenerator[Event, None]:
    """Run all of `generations`, which have the same number of choices, by `generate`.

    Choice i of generation p is choice `p * n + i` here. They are accepted when all are. The first error ends
    them all, as does closing the generator.

    Raises:
        GatewayError: one failed; unless it is about another field, the error names that prompt.
    """
    all_accepted = asyncio.Event()
    accepted: dict[int, Accepted] = {}
    usages: list[Usage] = []
    async with aclosing(_merged(generate, generations, all_accepted)) as merged:
        async for place, event in merged:
            if isinstance(event, Exception):
                raise _named(generations[place], event)
            if isinstance(event, Accepted):
                accepted[place] = event
                if len(accepted) == len(generations):
                    yield _all_accepted([accepted[place] for place in range(len(generations))])
                    all_accepted.set()
            elif isinstance(event, Delta):
                usage = _last(usages, event, len(generations))
                yield structs.replace(event, index=place * generations[place].n + event.index, usage=usage)
            else:
                yield event


async def choices_apart(generate: Generate, generation: Generation) -> AsyncGenerator[Event, None]:
    """Run each choice of a generation by `generate`, as a generation of its own, with a seed of its own.

    They are accepted when the first one is, and their prompt is counted once.

    Raises:
        Exception: whatever `generate` raised first; it ends them all.
    """
    begun = asyncio.Event()
    accepted: Accepted | None = None
    usages: list[Usage] = []
    apart = [structs.replace(generation, n=1, seed=generation.seed_of(at)) for at in range(generation.n)]
    async with aclosing(_merged(generate, apart, begun)) as merged:
        async for place, event in merged:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Delta):
                usage = _last(usages, event, generation.n)
                if usage is not None and accepted is not None:
                    cached = min(each.cached_tokens for each in usages)
                    usage = replace(usage, prompt_tokens=accepted.prompt_tokens, cached_tokens=cached)
                yield structs.replace(event, index=place, usage=usage)
            elif not isinstance(event, Accepted):
                yield event
            elif accepted is None:
                accepted = event
                yield event
                begun.set()


async def _merged(
    generate: Generate, generations: Sequence[Generation], begun: asyncio.Event
) -> AsyncGenerator[tuple[int, Event | Exception], None]:
    """Run `generations`; yield each one's events in order, with its place, and what it raised.

    One that was accepted waits until `begun` is set. Closing the generator ends them all.
    """
    # At most one event of each is read ahead of the client.
    arrivals: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(len(generations))
    readers = [
        asyncio.create_task(_read(generate(each), place, arrivals, begun))
        for place, each in enumerate(generations)
    ]
    running = len(generations)
    try:
        while running:
            place, arrived = await arrivals.get()
            if arrived is None:
                running -= 1
            else:
                yield place, arrived
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    events: AsyncGenerator[Event, None],
    place: int,
    arrivals: asyncio.Queue[tuple[int, Event | Exception | None]],
    begun: asyncio.Event,
) -> None:
    """Pass on one generation's events, then None; from `Accepted` on, wait for `begun`."""
    try:
        async with aclosing(events):
            async for event in events:
                await arrivals.put((place, event))
                if not isinstance(event, Heartbeat):  # which may come before it
                    await begun.wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Raised by the source, not by our closing it: otherwise this one would be silent for ever.
        await arrivals.put((place, UpstreamProtocolError("The upstream's answer was cut off.")))
    except Exception as error:  # noqa: BLE001 - passed on to whoever reads them all
        await arrivals.put((place, error))
    else:
        await arrivals.put((place, None))


def _named(generation: Generation, error: Exception) -> Exception:
    """Return the error of `generation`; it names the prompt unless it names a field."""
    field = generation.prompt_field
    if not isinstance(error, GatewayError) or error.param is not None or field is None:
        return error
    param = field if isinstance(error, InvalidRequestError) else None
    message, retry_after_s = f"{field}: {error.message}", error.retry_after_s
    return type(error)(message, param=param, retry_after_s=retry_after_s, reason=error.reason)


def _all_accepted(in_order: Sequence[Accepted]) -> Accepted:
    ids = [each for accepted in in_order for each in accepted.prompt_token_ids or ()]
    return Accepted(
        prompt_tokens=sum(accepted.prompt_tokens for accepted in in_order),
        prompt_token_ids=tuple(ids) or None,
        whole=any(accepted.whole for accepted in in_order),
    )


def _last(usages: list[Usage], delta: Delta, count: int) -> Usage | None:
    """Note a delta's usage among those of `count` generations; return the usage of all, with the last one."""
    if delta.usage is None:
        return None
    usages.append(delta.usage)
    return _sum(usages) if len(usages) == count else None


def _sum(usages: Sequence[Usage]) -> Usage:
    reasoning = [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        reasoning_tokens=sum(reasoning) if reasoning else None,
        queue_s=min((usage.queue_s for usage in usages if usage.queue_s is not None), default=None),
    )
