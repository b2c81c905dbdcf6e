"""The requests for the usual recipe and for ours, and the closed loops that send them."""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.commands.http_client import Client
from gateway.commands.load_rows import Answer
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request

TEMPERATURE, TOP_P = 0.8, 0.8
"""The defaults of `chat` in the original models' own code."""

_PROMPTS = (20, 40)
_NO_TEXT = 300
"""Ids at either end of a vocabulary that are not used: they may be bytes, special or padding."""
_TIMEOUT_S = 300.0
_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt's ids, and the exact length of its answer in tokens."""

    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of some requests."""

    seconds: float
    """From the first request to the last answer."""
    waited: list[float]
    """For each request, the seconds until its whole answer."""
    tokens: int
    """Number of requested tokens; those that a padded batch computes beyond a row's own answer do not
    count."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds


def draw(count: int, *, vocabulary: int, longest: int, seed: str) -> list[Job]:
    """Return requests, drawn uniformly: prompts of 20 to 40 random ids, answers of 1 to `longest` tokens."""
    dice = random.Random(seed)  # noqa: S311 - a prompt is no secret
    return [
        Job(
            tuple(dice.randrange(_NO_TEXT, vocabulary - _NO_TEXT) for _ in range(dice.randint(*_PROMPTS))),
            dice.randint(1, longest),
        )
        for _ in range(count)
    ]


def warm_up_batch(size: int, *, longest: int) -> list[Job]:
    """Return requests that, answered in one batch, pass through every length that drawn ones can have.

    Drawn prompts are of unequal length, and so are these, because padded batches are computed differently.
    """
    shortest, most = _PROMPTS
    first = Job((_NO_TEXT,) * (shortest - 1), longest + most - shortest + 1)
    return [first, *[Job((_NO_TEXT,) * shortest, first.answer)] * (size - 1)]


def in_batches(
    answer: Callable[[Sequence[Job]], object],
    jobs: Sequence[Job],
    *,
    clients: int,
    size: int,
    limit_s: float,
) -> Run:
    """Answer in static batches of up to `size`, first come, first served; begin none after `limit_s`.

    A batch begins when the previous one has ended, with the requests that then wait; all are answered at its
    end.
    """
    waited: list[float] = []
    tokens = 0
    ahead = iter(jobs)
    began = now = time.perf_counter()
    waiting = deque((each, now) for _, each in zip(range(clients), ahead, strict=False))
    while waiting and now - began < limit_s:
        batch = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        answer([each for each, _ in batch])
        now = time.perf_counter()
        waited += [now - since for _, since in batch]
        tokens += sum(each.answer for each, _ in batch)
        waiting.extend((each, now) for _, each in zip(batch, ahead, strict=False))
    return Run(seconds=now - began, waited=waited, tokens=tokens)


def by_engine(engine: Engine, jobs: Sequence[Job], *, clients: int) -> Run:
    """Answer the requests with our engine, in this thread.

    Raises:
        RuntimeError: a request failed.
    """
    waited: list[float] = []
    since: dict[str, float] = {}
    ahead = iter(enumerate(jobs))

    def ask() -> None:
        if (following := next(ahead, None)) is None:
            return
        number, each = following
        sampling = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=number, max_tokens=each.answer)
        since[str(number)] = time.perf_counter()
        engine.add(Request(request_id=str(number), prompt_ids=each.prompt, sampling=sampling))

    began = time.perf_counter()
    for _ in range(clients):
        ask()
    while engine.open_requests:
        engine.step()
        for output in engine.take_outputs():
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            if output.finish_reason is not None:
                waited.append(time.perf_counter() - since[output.request_id])
                ask()
    seconds = time.perf_counter() - began
    return Run(seconds=seconds, waited=waited, tokens=sum(each.answer for each in jobs))


async def by_server(url: str, model: str, jobs: Sequence[Job], *, clients: int) -> Run:
    """Answer the requests with the OpenAI server at `url`, streamed.

    Raises:
        RuntimeError: an answer has an error or a wrong number of tokens. HttpError: a request failed.
    """
    client = Client(url)
    ahead = iter(jobs)
    answers: list[Answer] = []

    async def keep_asking() -> None:
        for each in ahead:
            answer = Answer(sent=time.monotonic())
            answers.append(answer)
            await client.post(_PATH, _body(model, each), answer.take_event, timeout_s=_TIMEOUT_S)
            answer.finish(None)
            if answer.error is not None or answer.tokens != each.answer:
                raise RuntimeError(f"{answer.tokens} tokens instead of {each.answer}: {answer.error}")

    began = time.monotonic()
    await asyncio.gather(*(keep_asking() for _ in range(clients)))
    seconds = time.monotonic() - began
    client.close()
    return Run(
        seconds=seconds,
        waited=[each.ended - each.sent for each in answers],
        tokens=sum(each.tokens for each in answers),
    )


def _body(model: str, job: Job) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": job.prompt,
            "max_tokens": job.answer,
            "ignore_eos": True,
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
