"""What the usual recipe and ours are asked, and how: each client asks again as soon as it was answered."""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.http_client import Client
from bench.load_answer import Answer
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request

TEMPERATURE, TOP_P = 0.8, 0.8
"""As the original models' own `chat` samples."""

_PROMPTS = (20, 40)
_NO_TEXT = 300
"""Ids at either end of a vocabulary may be bytes, specials or padding."""
_TIMEOUT_S = 300.0
_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its prompt's ids, and the tokens of its answer, exactly."""

    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What became of some requests."""

    seconds: float
    """From the first question to the last answer."""
    waited: list[float]
    """Of each request: seconds from asking to its whole answer."""
    tokens: int
    """That were asked for; what a padded batch computes beyond a row's own answer does not count."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds


def draw(count: int, *, vocabulary: int, longest: int, seed: str) -> list[Asked]:
    """Return requests: prompts of 20 to 40 random ids, answers of 1 to `longest` tokens, evenly drawn."""
    dice = random.Random(seed)  # noqa: S311 - a prompt is no secret
    return [
        Asked(
            tuple(dice.randrange(_NO_TEXT, vocabulary - _NO_TEXT) for _ in range(dice.randint(*_PROMPTS))),
            dice.randint(1, longest),
        )
        for _ in range(count)
    ]


def warm_up_batch(size: int, *, longest: int) -> list[Asked]:
    """Return requests that, answered together, come to every length that drawn ones can have.

    Drawn prompts are of unequal length, and so are these: what is padded is computed by other means.
    """
    shortest, most = _PROMPTS
    first = Asked((_NO_TEXT,) * (shortest - 1), longest + most - shortest + 1)
    return [first, *[Asked((_NO_TEXT,) * shortest, first.answer)] * (size - 1)]


def in_batches(
    answer: Callable[[Sequence[Asked]], object],
    asked: Sequence[Asked],
    *,
    clients: int,
    size: int,
    limit_s: float,
) -> Run:
    """Answer in static batches of up to `size`, first come, first served; begin none after `limit_s`.

    A batch begins when the one before has ended, with whoever waits then; all are answered at its end.
    """
    waited: list[float] = []
    tokens = 0
    ahead = iter(asked)
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


def by_engine(engine: Engine, asked: Sequence[Asked], *, clients: int) -> Run:
    """Answer by our engine, in this thread.

    Raises:
        RuntimeError: a request failed.
    """
    waited: list[float] = []
    since: dict[str, float] = {}
    ahead = iter(enumerate(asked))

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
    return Run(seconds=seconds, waited=waited, tokens=sum(each.answer for each in asked))


async def by_server(url: str, model: str, asked: Sequence[Asked], *, clients: int) -> Run:
    """Answer by an OpenAI server at `url`, streamed.

    Raises:
        RuntimeError: a request failed.
        HttpError: it failed with a status.
    """
    client = Client(url)
    ahead = iter(asked)
    answers: list[Answer] = []

    async def keep_asking() -> None:
        for each in ahead:
            answer = Answer(asked=time.monotonic())
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
        waited=[each.ended - each.asked for each in answers],
        tokens=sum(each.tokens for each in answers),
    )


def _body(model: str, asked: Asked) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": asked.prompt,
            "max_tokens": asked.answer,
            "ignore_eos": True,
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
