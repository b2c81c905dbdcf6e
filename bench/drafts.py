"""Measures guessed tokens: the engine with and without guesses, on answers that are an edited text.

The model computes what it always does; then its logits are made those of an answer that is known beforehand:
the text of the prompt, a page of the documentation, of which some is changed. `python -m bench.drafts`
"""

import random
import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bench.engine import MEDIUM, random_model
from bench.rows import table
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel, Operations
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up

LARGE = replace(
    MEDIUM,
    layers=28,
    hidden=4096,
    feed_forward=13696,
    query_heads=32,
    head_dim=128,
    vocabulary=65024,
)
PAGES = Path(__file__).parents[1] / "docs"
TEXT, NEW_TOKENS = 350, 256
IDS = 256
"""Token ids that each sequence has of its own, by which the model knows the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One measurement; medians over the rounds, with and without guesses in turns."""

    changed: float
    batch: int
    draft_tokens: int
    tokens_per_second: float
    times: float
    """Of what it is without guesses."""
    tokens_per_step: float
    """Of one sequence."""
    right: float
    """Share of the guesses."""


def edited(text: list[int], changed: float, rng: random.Random) -> list[int]:
    """Return the text, with as many edits as a share `changed` of its tokens.

    An edit replaces, leaves out or puts in one to three tokens.
    """
    result: list[int] = []
    at = 0
    while at < len(text):
        if rng.random() >= changed:
            result.append(text[at])
            at += 1
            continue
        kind = rng.choice(("replace", "leave out", "put in"))
        if kind != "leave out":
            result += rng.choices(text, k=rng.randint(1, 3))
        if kind != "put in":
            at += rng.randint(1, 3)
    return result


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def tasks(count: int, changed: float) -> list[Task]:
    """Return tasks of different texts: pages of the documentation, cut into pieces as long as tokens are."""
    rng = random.Random(0)  # noqa: S311 - not for secrets
    pages = [each.read_text(encoding="utf-8") for each in sorted(PAGES.glob("*.md"))]
    found: list[Task] = []
    while len(found) < count:
        pieces = re.findall(r"\w{1,5}|\W", rng.choice(pages))
        if len(pieces) < 2 * TEXT:
            continue
        start = rng.randrange(len(pieces) - 2 * TEXT)
        ids: dict[str, int] = {}
        first = len(found) * IDS
        text = [first + ids.setdefault(each, len(ids)) for each in pieces[start : start + 2 * TEXT]]
        if len(ids) > IDS:
            continue
        # The second half, so that enough is left of it where much is left out.
        answer = edited(text[:TEXT], changed, rng) + text[TEXT:]
        found.append(Task(tuple(text[:TEXT]), tuple(answer[:NEW_TOKENS])))
    return found


class Writing:
    """A model that answers the prompts of up to `most` tasks with their answers."""

    def __init__(self, model: CausalModel, most: int) -> None:
        self._model = model
        self._texts = torch.zeros((most, TEXT + NEW_TOKENS), dtype=torch.int64, device=model.device)

    def learn(self, known: list[Task]) -> None:
        """Answer these tasks from now on; captured steps read them where the others were."""
        texts = torch.tensor([[*each.prompt, *each.answer] for each in known])
        self._texts[: len(known)].copy_(texts)

    def __getattr__(self, name: str) -> Any:
        """Return what the model has."""
        return getattr(self._model, name)

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute as the model does; the last two numbers of a hidden row tell the token to come."""
        hidden = self._model.forward(tokens, operations).clone()
        sequences = torch.clamp(tokens // IDS, max=len(self._texts) - 1)
        places = torch.clamp(operations.positions.long() + 1, 0, self._texts.shape[1] - 1)
        following = self._texts[sequences, places]
        # 16 bits have room for 256 integers each.
        hidden[:, -2], hidden[:, -1] = following // 256, following % 256
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the model's logits, and return others."""
        following = (hidden[:, -2] * 256).long() + hidden[:, -1].long()
        logits = self._model.logits(hidden, operations)
        logits.fill_(-1e4)
        return logits.scatter_(1, following[:, None], 0.0)


def measure(
    engines: dict[int, Engine], model: Writing, changed: float, batch: int, rounds: int
) -> list[DraftRow]:
    """Measure one batch size with each of the engines, by their `draft_tokens`, in turns."""
    rates: dict[int, list[float]] = {count: [] for count in engines}
    seen: dict[int, tuple[float, float]] = {}
    known = tasks(batch, changed)
    model.learn(known)
    for _ in range(rounds):
        for count, engine in engines.items():
            rate, per_step, right = _run(engine, known)
            rates[count].append(rate)
            seen[count] = per_step, right
    medians = {count: statistics.median(found) for count, found in rates.items()}
    return [
        DraftRow(
            changed=changed,
            batch=batch,
            draft_tokens=count,
            tokens_per_second=medians[count],
            times=medians[count] / medians[next(iter(engines))],
            tokens_per_step=seen[count][0],
            right=seen[count][1],
        )
        for count in engines
    ]


def _run(engine: Engine, known: list[Task]) -> tuple[float, float, float]:
    """Return tokens a second, tokens of a sequence in a step, and the share of right guesses."""
    for number, task in enumerate(known):
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=NEW_TOKENS)
        engine.add(
            Request(request_id=str(number), prompt_ids=task.prompt, sampling=params, prefix_cache=False)
        )
    began = time.perf_counter()
    steps = guessed = right = sequences = tokens = 0
    # Until the first ends: a server gives its place to another, and would not go on with fewer.
    while engine.open_requests == len(known):
        stats = engine.step()
        if stats is None:
            continue
        if stats.prefill_tokens:
            began = time.perf_counter()
            continue
        steps += 1
        guessed += stats.guessed_tokens
        right += stats.right_guesses
        sequences += stats.batch_size
        tokens += stats.decode_tokens
    taken = time.perf_counter() - began
    while engine.open_requests:
        engine.step()
    answers: list[list[int | None]] = [[] for _ in known]
    for output in engine.take_outputs():
        answers[int(output.request_id)].append(output.token_id)
    if answers != [list(each.answer[:NEW_TOKENS]) for each in known]:
        raise click.ClickException("an answer is not the one that was to be written")
    return tokens / taken, tokens / sequences, right / guessed if guessed else 0.0


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--draft-tokens", "counts", type=int, multiple=True, default=(0, 8, 16), show_default=True)
@click.option("--changed", "shares", type=float, multiple=True, default=(0.0, 0.02, 0.1, 0.3, 1.0))
@click.option("--quantization", help="int8, int4 or fp8.")
def main(
    rounds: int,
    batches: tuple[int, ...],
    counts: tuple[int, ...],
    shares: tuple[float, ...],
    quantization: str | None,
) -> None:
    """Print a table for random models: of 100 million parameters on a CPU, ChatGLM3-6B's shape on a GPU."""
    cuda = torch.cuda.is_available()
    config, dtype = (LARGE, torch.bfloat16) if cuda else (MEDIUM, torch.float32)
    with torch.inference_mode():
        model = random_model(
            config, dtype=dtype, device=torch.device("cuda" if cuda else "cpu"), quantization=quantization
        )
    writing = Writing(model, max(batches))
    engines = {}
    for count in counts:
        settings = EngineSettings(
            max_running=256,
            max_batched_tokens=2048,
            max_context=1024,
            block_size=64,
            kv_blocks=2048,
            draft_tokens=count,
        )
        engines[count] = Engine(writing, settings)
        warm_up(engines[count])
    rows: list[DraftRow] = []
    for changed in shares:
        for batch in batches:
            rows += measure(engines, writing, changed, batch, rounds)
    click.echo(table(DraftRow, rows))


if __name__ == "__main__":
    main()
