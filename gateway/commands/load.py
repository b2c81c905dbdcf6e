"""Puts load on any OpenAI endpoint, from several processes.

In a closed loop, a fixed number of clients each send the next request as soon as the last was answered. In an
open loop, requests begin at random moments with a given mean rate, regardless of earlier ones (a Poisson
process). Prompts are token ids or words sent to `/v1/completions`, the same for every server, or a question
or words sent to `/v1/chat/completions`.

The same options give the same requests. The clients are spread over processes, so that the server and not
Python is measured.
"""

import asyncio
import json
import multiprocessing
import random
import signal
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, count, product
from typing import TYPE_CHECKING, Any, Final, Self

import uvloop

from gateway.commands.http_client import Client, HttpError
from gateway.commands.load_rows import Answer, LoadRow, summarise

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_START_S = 0.5
"""Time from telling the processes to begin until all of them begin together."""

_PROGRESS_S = 0.2

_answered: "Synchronized[int] | None" = None
"""Counts what this process and its siblings have had answered; None: nobody counts."""

TEXT_IDS: Final = range(300, 60_000)
"""Ids that are text in every vocabulary of this size, neither bytes nor special."""

_WORDS = [
    f" {first}{second}{third}"
    for first, second, third in product(string.ascii_lowercase, repeat=3)
    if first < second
]
"""A token each where a vocabulary was made of all words of three letters, merged in the alphabet's order."""

_LONGEST = 8.0
"""Of the lengths that differ, over the median: one request in fifty, where the spread is 1."""

_QUESTION = "你好，请介绍一下自己。"


Turn = tuple[str, Answer]
"""The name of a request that was answered, and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a measurement."""

    url: str
    model: str
    ids: int | None = None
    """Length of prompts of random ids; None: text."""
    words: int | None = None
    """Number of random words in prompts of text; None: a question, as a chat."""
    chat: bool = False
    """Whether these words are a chat, too."""
    key: str | None = None
    """Sent as the bearer key."""
    ignore_eos: bool = True
    """Whether answers must have all of their tokens; not every endpoint can be told so."""
    shared: int = 0
    """Number of ids at the beginning that are the same in all prompts; they count towards `ids`."""
    ids_below: int = TEXT_IDS.stop
    """The model has at least so many ids."""
    out: int = 256
    """Tokens of each answer, exactly if `ignore_eos` is set."""
    spread: float = 0.0
    """Standard deviation of the lengths' natural logarithms; the stated lengths are then medians. No
    length is over `_LONGEST` times that. 0: all are equal."""
    turns: int = 1
    """Requests of a conversation: each has all of the earlier prompts and answers in front of its own prompt,
    and only the first has what is shared."""
    temperature: float = 1.0
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the requests."""
    stream: bool = True
    timeout_s: float = 300.0

    @property
    def path(self) -> str:
        """The path of the route."""
        chat = self.ids is None and (self.chat or self.words is None)
        return "/v1/chat/completions" if chat else "/v1/completions"

    def body(self, name: str, before: Sequence[Turn] = ()) -> bytes:
        """Return the request called `name`, with the turns before it: the same names give the same one."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": round(self.out * self._factors(name)[1]) or 1,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= self.also
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ids is not None:
            body["prompt"] = self._ids("shared", self.shared)
            for asked, answer in before:
                body["prompt"] += [*self._own_ids(asked), *answer.ids]
            body["prompt"] += self._own_ids(name)
            if self.turns > 1:
                body["return_token_ids"] = True
        elif self.chat or self.words is None:
            body["messages"] = [
                message
                for asked, answer in before
                for message in (
                    {"role": "user", "content": self._text(asked)},
                    {"role": "assistant", "content": answer.text},
                )
            ]
            body["messages"].append({"role": "user", "content": self._text(name)})
        else:
            body["prompt"] = "".join(self._text(asked) + answer.text for asked, answer in before)
            body["prompt"] += self._text(name)
        return json.dumps(body).encode()

    def _text(self, name: str) -> str:
        if self.words is None:
            return _QUESTION
        dice = random.Random(name)  # noqa: S311 - a prompt is no secret
        return "".join(dice.choices(_WORDS, k=round(self.words * self._factors(name)[0]) or 1))

    def _own_ids(self, name: str) -> list[int]:
        return self._ids(name, round(((self.ids or 0) - self.shared) * self._factors(name)[0]) or 1)

    def _factors(self, name: str) -> tuple[float, float]:
        """Return by how much the lengths of a prompt and of its answer differ from their medians."""
        if not self.spread:
            return 1.0, 1.0
        dice = random.Random(name)  # noqa: S311 - a length is no secret
        prompt, answer = (min(_LONGEST, dice.lognormvariate(0.0, self.spread)) for _ in range(2))
        return prompt, answer

    def _ids(self, name: str, length: int) -> list[int]:
        dice = random.Random(name)  # noqa: S311 - a prompt is no secret
        # Of a small vocabulary the upper half, so that prompts still differ.
        first = min(TEXT_IDS.start, self.ids_below // 2)
        return [dice.randrange(first, self.ids_below) for _ in range(length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One process's share of a row."""

    workload: Workload
    name: str
    begin: float
    """On the clock of `time.monotonic`, which all processes of a machine share."""
    clients: int = 0
    requests: int = 0
    rate: float = 0.0
    """Requests a second; 0: closed loop."""
    seconds: float = 0.0


def closed_loop(pool: "LoadPool", workload: Workload, name: str, *, clients: int, requests: int) -> LoadRow:
    """Let `clients` clients send `requests` requests in all."""
    shares = min(pool.processes, clients)
    parts = [
        {"clients": _share(clients, shares, number), "requests": _share(requests, shares, number)}
        for number in range(shares)
    ]
    return pool.run(workload, name, parts)


def open_loop(pool: "LoadPool", workload: Workload, name: str, *, rate: float, seconds: float) -> LoadRow:
    """Begin `rate` requests per second on average, for `seconds`, and wait for the last answer."""
    parts = [{"rate": rate / pool.processes, "seconds": seconds} for _ in range(pool.processes)]
    return pool.run(workload, name, parts)


class LoadPool:
    """Processes that send requests, kept for many rows.

    Args:
        processes: how many.
        on_progress: told, several times a second, how many requests of a row have been answered.
    """

    def __init__(self, processes: int, on_progress: Callable[[int], None] = lambda _: None) -> None:
        self.processes = processes
        self._on_progress = on_progress
        spawning = multiprocessing.get_context("spawn")
        self._answered = spawning.Value("L", 0)
        self._executor = ProcessPoolExecutor(processes, spawning, _begin, (self._answered,))

    def __enter__(self) -> Self:
        # Start all processes before the first row, which they begin together.
        list(self._executor.map(time.sleep, [_START_S] * self.processes))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # else it would wait for every answer
            for process in multiprocessing.active_children():
                process.terminate()
        self._executor.shutdown(cancel_futures=True)

    def run(self, workload: Workload, name: str, parts: Sequence[dict[str, Any]]) -> LoadRow:
        """Measure one row, with one part in each process."""
        begin = time.monotonic() + _START_S
        rate = sum(part.get("rate", 0.0) for part in parts)
        clients = sum(part.get("clients", 0) for part in parts)
        shares = [
            _Part(workload=workload, name=f"{name}/{number}", begin=begin, **part)
            for number, part in enumerate(parts)
        ]
        self._answered.value = 0
        working = {self._executor.submit(_work, share) for share in shares}
        while wait(working, timeout=_PROGRESS_S).not_done:
            self._on_progress(self._answered.value)
        answers = [answer for done in working for answer in done.result()]
        return summarise(answers, clients=clients, rate=rate)


def _begin(answered: "Synchronized[int]") -> None:
    """Prepare a process, which a terminal's Ctrl-C is not for."""
    global _answered  # noqa: PLW0603 - it is the process's, and cannot be sent with its work
    _answered = answered
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(part: _Part) -> list[Answer]:
    return uvloop.run(_closed(part) if part.clients else _open(part))


async def _closed(part: _Part) -> list[Answer]:
    names = iter(range(part.requests))
    client = Client(part.workload.url, part.workload.key)

    async def keep_asking() -> list[Answer]:
        # All clients of a process share the iterator of names: the next free client takes the next.
        answers: list[Answer] = []
        for number in names:
            answers += await _converse(client, part.workload, f"{part.name}/{number}")
        return answers

    await asyncio.sleep(part.begin - time.monotonic())
    answers = await asyncio.gather(*(keep_asking() for _ in range(part.clients)))
    client.close()
    return list(chain.from_iterable(answers))


async def _open(part: _Part) -> list[Answer]:
    client = Client(part.workload.url, part.workload.key)
    due = part.begin
    asking = []
    for number, gap_s in zip(count(), _gaps(part.name, part.rate), strict=False):
        due += gap_s
        if due > part.begin + part.seconds:
            break
        await asyncio.sleep(due - time.monotonic())
        asking.append(asyncio.create_task(_converse(client, part.workload, f"{part.name}/{number}", due)))
    answers = [await task for task in asking]
    client.close()
    return list(chain.from_iterable(answers))


def _gaps(name: str, rate: float) -> Iterator[float]:
    dice = random.Random(name)  # noqa: S311 - arrivals are no secret
    while True:
        yield dice.expovariate(rate)


async def _converse(client: Client, workload: Workload, name: str, due: float | None = None) -> list[Answer]:
    """Send the requests of one conversation, of which most have one; what fails ends it.

    In an open loop the first one's time counts from when it was `due`, even if it began late.
    """
    before: list[Turn] = []
    for turn in range(workload.turns):
        asked = f"{name}/{turn}" if turn else name
        answer = await _ask(client, workload, workload.body(asked, before), due if not turn else None)
        before.append((asked, answer))
        if answer.error is None and workload.ids is not None and workload.turns > 1:
            answer.need_ids()
        if answer.error is not None:
            break
    return [answer for _, answer in before]


async def _ask(client: Client, workload: Workload, body: bytes, due: float | None) -> Answer:
    answer = Answer(sent=time.monotonic() if due is None else due)
    try:
        rest = await client.post(workload.path, body, answer.take_event, timeout_s=workload.timeout_s)
        answer.finish(None if workload.stream else rest)
    except (HttpError, ValueError) as error:
        answer.error = str(error)
    if _answered is not None:
        with _answered.get_lock():
            _answered.value += 1
    return answer


def _share(total: int, parts: int, number: int) -> int:
    return total // parts + (number < total % parts)
