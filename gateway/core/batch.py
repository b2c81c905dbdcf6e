"""Several prompts of one request, run concurrently and merged into one stream of events.

Each prompt is a separate generation for the upstream. The merged stream follows the rules of a single one:
one `Accepted` when all are accepted, deltas in order of arrival, and the usage with the very last one. Knows
nothing of JSON or tensors.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec import structs

from gateway.core.events import Accepted, Delta, Event, Heartbeat, Usage
from gateway.core.request import Generation
from gateway.errors import GatewayError, InvalidRequestError, UpstreamProtocolError

Generate = Callable[[Generation], AsyncGenerator[Event, None]]
"""As `gateway.core.upstream.Upstream.generate`."""


async def together(generate: Generate, generations: Sequence[Generation]) -> AsyncGenerator[Event, None]:
    """Run all of `generations`, which have the same number of choices, by `generate`.

    Choice i of generation p is choice `p * n + i` here. The first error ends them all, as does closing the
    generator.

    Raises:
        GatewayError: one failed; unless it is about another field, the error names that prompt.
    """
    # At most one event of each is read ahead of the client.
    arrivals: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(len(generations))
    all_accepted = asyncio.Event()
    readers = [
        asyncio.create_task(_read(generate(each), place, arrivals, all_accepted))
        for place, each in enumerate(generations)
    ]
    accepted: dict[int, Accepted] = {}
    usages: list[Usage] = []
    running = len(generations)
    try:
        while running:
            place, arrived = await arrivals.get()
            if arrived is None:
                running -= 1
            elif isinstance(arrived, Exception):
                raise _named(generations[place], arrived)
            elif isinstance(arrived, Accepted):
                accepted[place] = arrived
                if len(accepted) == len(generations):
                    yield _all_accepted([accepted[place] for place in range(len(generations))])
                    all_accepted.set()
            elif isinstance(arrived, Delta):
                usage = None
                if arrived.usage is not None:
                    usages.append(arrived.usage)
                    usage = _sum(usages) if len(usages) == len(generations) else None
                index = place * generations[place].n + arrived.index
                yield structs.replace(arrived, index=index, usage=usage)
            else:
                yield arrived
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    events: AsyncGenerator[Event, None],
    place: int,
    arrivals: asyncio.Queue[tuple[int, Event | Exception | None]],
    all_accepted: asyncio.Event,
) -> None:
    """Pass on one generation's events, then None; after `Accepted` wait until all generations have that."""
    try:
        async with aclosing(events):
            async for event in events:
                await arrivals.put((place, event))
                if not isinstance(event, Heartbeat):  # which may come before it
                    await all_accepted.wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Raised by the source, not by our closing it: otherwise this prompt would be silent for ever.
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
    return type(error)(f"{field}: {error.message}", param=param, retry_after_s=error.retry_after_s)


def _all_accepted(in_order: Sequence[Accepted]) -> Accepted:
    ids = [each for accepted in in_order for each in accepted.prompt_token_ids or ()]
    return Accepted(
        prompt_tokens=sum(accepted.prompt_tokens for accepted in in_order),
        prompt_token_ids=tuple(ids) or None,
    )


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        queue_s=min((usage.queue_s for usage in usages if usage.queue_s is not None), default=None),
    )
