"""Kills one of two Tritons under a load of mixed answers, and compares each answer with the undisturbed one.

`python -m bench.resume --clients 256` prints how many answers failed, differ, and were resumed. In float32
all must be the same.
"""

import asyncio
import itertools
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
import psutil

from bench.serving import running

_TIMEOUT_S = 500.0
_LOGPROB_TOLERANCE = 1e-3
"""Of natural logs, in float32: the rounding of another batch."""

_LIST = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "schema": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
            "required": ["numbers"],
        },
    },
}

_KINDS: tuple[dict[str, Any], ...] = (
    {"stream": True, "temperature": 0},
    {"stream": True, "temperature": 1},
    {"stream": False, "temperature": 1},
    {"stream": True, "temperature": 1, "n": 2, "logprobs": True, "top_logprobs": 3},
    {"stream": True, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"stream": True, "temperature": 1, "response_format": _LIST, "ignore_eos": False},
    {"stream": False, "temperature": 1, "n": 2, "logprobs": True},
    {"stream": True, "temperature": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9},
    {"stream": True, "temperature": 1, "stop": ["absent from it"], "min_p": 0.01, "bad_words": ["b"]},
)
_WORDS = ("你好", "hello", "one, two, three", "天气", "a story")


@dataclass
class Answer:
    """What a client got: one entry of each list per choice."""

    ids: set[str] = field(default_factory=set)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    tokens: tuple[int, int] | None = None
    """Of the prompt and of all choices."""
    error: str | None = None

    def add(self, document: dict[str, Any]) -> None:
        """Add a chunk, or a whole answer."""
        if "error" in document:
            self.error = str(document["error"]["message"])
            return
        self.ids.add(document["id"])
        for choice in document["choices"]:
            index, part = choice["index"], choice.get("delta") or choice.get("message") or {}
            self.texts[index] = self.texts.get(index, "") + (part.get("content") or "")
            content = (choice.get("logprobs") or {}).get("content") or ()
            self.logprobs.setdefault(index, []).extend((each["token"], each["logprob"]) for each in content)
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]
        if usage := document.get("usage"):
            self.tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def differs(self, other: "Answer") -> str | None:
        """Return what the other answer has otherwise; None: nothing."""
        for name in ("error", "tokens", "reasons", "texts"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)!r}, {getattr(other, name)!r}"
        if len(self.ids) != 1 or len(other.ids) != 1:
            return f"{len(self.ids)} and {len(other.ids)} ids"
        for index, mine in self.logprobs.items():
            theirs = other.logprobs[index]
            if [token for token, _ in mine] != [token for token, _ in theirs]:
                return f"tokens of choice {index}"
            off = [abs(a - b) for (_, a), (_, b) in zip(mine, theirs, strict=True)]
            if max(off, default=0) > _LOGPROB_TOLERANCE:
                return f"log-probabilities of choice {index} by {max(off)}"
        return None


def bodies(count: int, tokens: int, model: str) -> list[dict[str, Any]]:
    """Return `count` different requests of all kinds, with about `tokens` tokens each."""
    kinds = itertools.islice(itertools.cycle(_KINDS), count)
    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": f"{_WORDS[number % len(_WORDS)]} {number}"}],
            "max_tokens": tokens + 7 * (number % 11),
            "seed": number,
            "ignore_eos": True,
        }
        | kind
        | ({"stream_options": {"include_usage": True}} if kind["stream"] else {})
        for number, kind in enumerate(kinds)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], begun: Callable[[], object]) -> Answer:
    """Return the answer; `begun` is called at the first chunk of a streamed one."""
    answer = Answer()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not body["stream"] or response.status_code != httpx.codes.OK:
                answer.add(json.loads(await response.aread()))
                return answer
            ended = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    answer.add(json.loads(line.removeprefix("data: ")))
                    begun()
            if not ended:
                answer.error = answer.error or "the stream was cut"
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def answers(
    base_url: str, requests: Sequence[dict[str, Any]], disturb: Callable[[], Awaitable[None]] | None = None
) -> list[Answer]:
    """Ask all at once; `disturb` once an eighth of the streams have begun: clients in Python see it late."""
    limits = httpx.Limits(max_connections=None)
    some, count = asyncio.Event(), itertools.count(1)
    enough = sum(body["stream"] for body in requests) // 8
    seen: set[int] = set()

    def begun(number: int) -> None:
        if number not in seen:
            seen.add(number)
            if next(count) >= enough:
                some.set()

    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, limits=limits) as client:
        asked = [
            asyncio.create_task(ask(client, body, lambda number=number: begun(number)))  # type: ignore[misc]
            for number, body in enumerate(requests)
        ]
        if disturb is not None:
            await some.wait()
            await disturb()
        return await asyncio.gather(*asked)


def victims(pid: int, what: str) -> list[psutil.Process]:
    """Return the processes below `pid` that are Tritons, or `stub`s of models."""
    pattern = r"triton_python_backend_stub$" if what == "stub" else r"bin/tritonserver$"
    below = psutil.Process(pid).children(recursive=True)
    return [each for each in below if re.search(pattern, (each.cmdline() or [""])[0])]


@click.command()
@click.option("--clients", default=64, show_default=True)
@click.option("--tokens", default=150, show_default=True, help="of the shortest answer")
@click.option(
    "--kill", type=click.Choice(["server", "term", "stub", "nothing"]), default="server", show_default=True
)
@click.argument("flags", nargs=-1)
def main(clients: int, tokens: int, kill: str, flags: tuple[str, ...]) -> None:
    """Show that answers survive their server's death; FLAGS, behind `--`, are those of `tritongate up`."""
    with running(*(flags or ("--replicas", "2", "--device", "cpu", "--dtype", "float32"))) as url:
        name = httpx.get(url + "/v1/models", timeout=20).json()["data"][0]["id"]
        requests = bodies(clients, tokens, name)
        undisturbed = asyncio.run(answers(url, requests))

        async def disturb() -> None:
            if kill != "nothing":
                victim = victims(os.getpid(), kill)[0]
                if kill == "term":
                    victim.terminate()
                else:
                    victim.kill()
                click.echo(f"killed {kill} {victim.pid}")

        started = time.monotonic()
        disturbed = asyncio.run(answers(url, requests, disturb))
        took = time.monotonic() - started
        text = httpx.get(url + "/metrics", timeout=20).text
    resumed = sum(float(found) for found in re.findall(r"tritongate_resumed_total\{.*\} (\S+)", text))
    failed = [each.error for each in disturbed if each.error is not None]
    differ = [
        found
        for before, after in zip(undisturbed, disturbed, strict=True)
        if after.error is None and (found := before.differs(after)) is not None
    ]
    click.echo(
        f"{clients} answers in {took:.1f} s: "
        f"{len(failed)} failed, {len(differ)} differ, {resumed:.0f} resumed"
    )
    for line in (*failed, *differ):
        click.echo(line[:300])


if __name__ == "__main__":
    main()
