"""Measures how much of growing conversations Tritons have in their caches, and how even their load is.

`python -m bench.affinity 127.0.0.1:8001 127.0.0.1:8003 127.0.0.1:8005 --model chatglm3`: the conversations
are held once with the first Triton alone, once where the fewest requests run, and once as the gateway
chooses. Every run has texts of its own, so that no cache knows them. The addresses are Tritons' own, of
a repository as `tritongate build` writes it; `tritongate up` keeps its Triton to itself.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

import click

from gateway.core.events import Delta, Usage
from gateway.core.request import Conversation, Generation, Message
from gateway.telemetry.tracing import Trace, current_trace
from gateway.triton import attempts, pool
from gateway.triton.affinity import prefix_key
from gateway.triton.options import PoolOptions
from gateway.triton.replicas import ReplicaState

_SYSTEM = 400
_QUESTION = 80
"""Characters of the system prompt, which all conversations share, and of each question."""
_LOOK_EVERY_S = 0.02
_WORDS = ("river", "stone", "cloud", "lantern", "copper", "meadow", "signal", "harbour", "winter", "needle")


class Conversations:
    """Holds conversations, and counts what was asked, cached and served where."""

    def __init__(
        self, upstream: pool.TritonUpstream, model: str, *, turns: int, new_tokens: int, pause_s: float
    ) -> None:
        self._upstream = upstream
        self._model = model
        self._turns = turns
        self._new_tokens = new_tokens
        self._pause_s = pause_s
        self._chance = random.Random()  # noqa: S311 - texts, not secrets
        self._system = Message(role="system", content=self._text(_SYSTEM))
        self.usage: list[Usage] = []
        self.served: Counter[str] = Counter()
        """Requests by address."""
        self.running: Counter[str] = Counter()
        """Requests that run there, summed over moments."""

    def _text(self, characters: int) -> str:
        words: list[str] = []
        while sum(map(len, words)) + len(words) < characters:
            words.append(self._chance.choice(_WORDS))
        return " ".join(words)

    async def hold(self, number: int) -> None:
        """Hold one conversation."""
        messages = [self._system]
        for turn in range(self._turns):
            await asyncio.sleep(self._chance.uniform(0, self._pause_s))
            messages.append(Message(role="user", content=self._text(_QUESTION)))
            said = await self._ask(f"{number}-{turn}", messages)
            messages.append(Message(role="assistant", content=said))

    async def watch(self) -> None:
        """Count what runs where, until cancelled."""
        while True:
            for replica in self._upstream.replicas():
                self.running[replica.upstream] += replica.outstanding
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _ask(self, name: str, messages: Sequence[Message]) -> str:
        trace = Trace()
        current_trace.set(trace)
        request = Generation(
            request_id=name,
            model=self._model,
            prompt=Conversation(tuple(messages)),
            deadline=asyncio.get_running_loop().time() + 600,
            max_tokens=self._new_tokens,
            ignore_eos=True,
        )
        text = ""
        async with aclosing(self._upstream.generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    if event.usage is not None:
                        self.usage.append(event.usage)
        self.served[trace.calls[-1][-1]] += 1
        return text


async def _measure(addresses: Sequence[str], model: str, conversations: int, **options: Any) -> str:
    upstream = pool.TritonUpstream(addresses, PoolOptions(models=[model]))
    await upstream.start()
    try:
        while any(replica.state is not ReplicaState.READY for replica in upstream.replicas()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        held = Conversations(upstream, model, **options)
        watching = asyncio.create_task(held.watch())
        await asyncio.gather(*(held.hold(number) for number in range(conversations)))
        watching.cancel()
    finally:
        await upstream.close()
    prompts = sum(usage.prompt_tokens for usage in held.usage)
    cached = sum(usage.cached_tokens for usage in held.usage)
    served = " / ".join(str(held.served[address]) for address in addresses)
    load = f"{_uneven(held.running, addresses):.2f} | {_uneven(held.served, addresses):.2f}"
    return f"{cached / prompts:.3f} | {load} | {served} | {prompts:,}"


def _uneven(counted: Counter[str], addresses: Sequence[str]) -> float:
    """Return the largest count, as a multiple of an even share."""
    return max(counted.values()) * len(addresses) / sum(counted.values())


@click.command()
@click.argument("addresses", nargs=-1, required=True)
@click.option("--model", required=True, help="an entry that all of them have")
@click.option("--conversations", default=60, show_default=True, help="all at once")
@click.option("--turns", default=8, show_default=True)
@click.option("--new-tokens", default=16, show_default=True, help="of each answer")
@click.option("--pause-s", default=0.0, show_default=True, help="longest pause before a turn")
@click.option("--repeats", default=1, show_default=True)
def main(addresses: tuple[str, ...], model: str, conversations: int, repeats: int, **options: Any) -> None:
    """Hold the conversations with the Tritons at ADDRESSES."""
    click.echo(
        "| chosen by | cached share | most running, times even | most requests | requests | prompt tokens |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- |")
    for _ in range(repeats):
        for name in ("one server", "least loaded", "prefix"):
            chosen = addresses[:1] if name == "one server" else addresses
            key = prefix_key if name == "prefix" else lambda *_: None
            with patch.object(attempts, "prefix_key", key):
                row = asyncio.run(_measure(chosen, model, conversations, **options))
            click.echo(f"| {name} | {row} |")


if __name__ == "__main__":
    main()
