"""Several prompts of one request, run concurrently and merged into one stream of events.

Each prompt is a separate generation for the upstream. The merged stream follows the rules of a single one:
one `Accepted` when all are accepted, deltas in order of arrival, and the usage with the very last one. Knows
nothing of JSON or tensors.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec import structs

from gateway.errors import GatewayError, InvalidRequestError, UpstreamProtocolError
from gateway.generation import Accepted, Delta, Event, Generation, Usage

Generate = Callable[[Generation], AsyncGenerator[Event, None]]
"""As `gateway.upstream.Upstream.generate`."""


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
    whole = _Whole(generations)
    try:
        while whole.unended:
            place, arrived = await arrivals.get()
            if isinstance(arrived, Exception):
                raise whole.named(place, arrived)
            if (event := whole.take(place, arrived)) is not None:
                yield event
            if whole.accepted:
                all_accepted.set()
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


class _Whole:
    """The merged state of all generations."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._accepted: dict[int, Accepted] = {}
        self._usages: list[Usage] = []
        self.unended = len(generations)

    @property
    def accepted(self) -> bool:
        """Whether all were accepted."""
        return len(self._accepted) == len(self._generations)

    def take(self, place: int, event: Event | None) -> Event | None:
        """Take the next event of the generation at `place`, None for its end; return the merged event."""
        if event is None:
            self.unended -= 1
        elif isinstance(event, Accepted):
            self._accepted[place] = event
            return self._all_accepted() if self.accepted else None
        elif isinstance(event, Delta):
            return self._delta(place, event)
        return event

    def named(self, place: int, error: Exception) -> Exception:
        """Return the error of the generation at `place`; it names the prompt unless it names a field."""
        field = self._generations[place].prompt_field
        if not isinstance(error, GatewayError) or error.param is not None or field is None:
            return error
        param = field if isinstance(error, InvalidRequestError) else None
        return type(error)(f"{field}: {error.message}", param=param, retry_after_s=error.retry_after_s)

    def _all_accepted(self) -> Accepted:
        in_order = [self._accepted[place] for place in range(len(self._generations))]
        ids = [each for accepted in in_order for each in accepted.prompt_token_ids or ()]
        return Accepted(
            prompt_tokens=sum(accepted.prompt_tokens for accepted in in_order),
            prompt_token_ids=tuple(ids) or None,
        )

    def _delta(self, place: int, delta: Delta) -> Delta:
        index = place * self._generations[place].n + delta.index
        if delta.usage is not None:
            self._usages.append(delta.usage)
        usage = self._sum() if delta.usage is not None and self._all_counted() else None
        return structs.replace(delta, index=index, usage=usage)

    def _all_counted(self) -> bool:
        return len(self._usages) == len(self._generations)

    def _sum(self) -> Usage:
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._usages),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages),
            cached_tokens=sum(usage.cached_tokens for usage in self._usages),
        )
