"""Measures guessed tokens: the engine with and without guesses, on texts that repeat themselves more or less.

The model computes what it always does. Then one token of its logits, the next of a fixed text that repeats,
is made as likely as `following`: that share of the guesses is right, and else the text is left.
`python -m bench.drafts`
"""

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor

from bench.engine import MEDIUM, random_model
from gateway.commands.load_rows import table
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel, Operations
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings

LARGE = replace(MEDIUM, layers=28, hidden=4096, feed_forward=13696, query_heads=32, head_dim=128)
PERIOD = 50
NEW_TOKENS = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One measurement; medians over the rounds, with and without guesses in turns."""

    following: float
    batch: int
    draft_tokens: int
    tokens_per_second: float
    times: float
    """Of what it is without guesses."""
    tokens_per_step: float
    """Of one sequence."""
    right: float
    """Share of the guesses."""


class Repeating:
    """A model whose text goes round in a circle of `PERIOD` tokens, but for a share of 1 - `following`."""

    def __init__(self, model: CausalModel, following: float) -> None:
        self._model = model
        vocabulary = model.vocab_size
        others = -math.inf if following == 1 else math.log((1 - following) / (vocabulary - 1))
        self._scores = max(math.log(following), -1e9) if following else others, others
        self._tokens = torch.zeros(0, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        """Return what the model has."""
        return getattr(self._model, name)

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute as the model does; the last number of a hidden row becomes the row's token."""
        hidden = self._model.forward(tokens, operations).clone()
        hidden[:, -1] = tokens
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        """Compute the model's logits, and return others."""
        tokens = hidden[:, -1].long()
        logits = self._model.logits(hidden, operations)
        likely, others = self._scores
        logits.fill_(max(others, -1e4))
        logits.scatter_(1, (tokens[:, None] + 1) % PERIOD, likely)
        return logits


def measure(
    model: CausalModel, following: float, batch: int, counts: tuple[int, ...], rounds: int
) -> list[DraftRow]:
    """Measure one batch size with each of these `draft_tokens`, in turns."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    seen: dict[int, tuple[float, float]] = {}
    engines: dict[int, Engine] = {}
    for _ in range(rounds + 1):
        for count in counts:
            settings = EngineSettings(
                max_running=256, max_batched_tokens=512, max_context=512, kv_blocks=4096, draft_tokens=count
            )
            engines[count] = engines.get(count) or Engine(Repeating(model, following), settings)
            rate, per_step, right = _run(engines[count], batch)
            rates[count].append(rate)
            seen[count] = per_step, right
    # The first of each compiles and captures.
    medians = {count: statistics.median(found[1:]) for count, found in rates.items()}
    return [
        DraftRow(
            following=following,
            batch=batch,
            draft_tokens=count,
            tokens_per_second=medians[count],
            times=medians[count] / medians[counts[0]],
            tokens_per_step=seen[count][0],
            right=seen[count][1],
        )
        for count in counts
    ]


def _run(engine: Engine, batch: int) -> tuple[float, float, float]:
    """Return tokens a second, tokens of a sequence in a step, and the share of right guesses."""
    for number in range(batch):
        prompt = tuple((number + each) % PERIOD for each in range(2 * PERIOD))
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=NEW_TOKENS)
        engine.add(Request(request_id=str(number), prompt_ids=prompt, sampling=params, prefix_cache=False))
    began = time.perf_counter()
    steps = guessed = right = sequences = tokens = 0
    # Until the first ends: a server gives its place to another, and would not go on with fewer.
    while engine.open_requests == batch:
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
    engine.take_outputs()
    return tokens / taken, tokens / sequences, right / guessed if guessed else 0.0


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--draft-tokens", "counts", type=int, multiple=True, default=(0, 4, 8, 16), show_default=True)
@click.option("--following", "shares", type=float, multiple=True, default=(0.0, 0.5, 0.8, 0.95))
def main(rounds: int, batches: tuple[int, ...], counts: tuple[int, ...], shares: tuple[float, ...]) -> None:
    """Print a table for random models: of 100 million parameters on a CPU, ChatGLM3-6B's shape on a GPU."""
    with torch.inference_mode():
        if torch.cuda.is_available():
            model = random_model(LARGE, dtype=torch.bfloat16, device=torch.device("cuda"))
        else:
            model = random_model(MEDIUM, dtype=torch.float32, device=torch.device("cpu"))
    rows: list[DraftRow] = []
    for following in shares:
        for batch in batches:
            rows += measure(model, following, batch, counts, rounds)
    click.echo(table(DraftRow, rows))


if __name__ == "__main__":
    main()
