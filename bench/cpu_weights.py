"""Compares the forms of weights on a CPU: the engine alone, one model of random weights in each, in turns.

The rule is that a form is offered on a CPU where a decode step of one sequence takes two thirds of float32's
time or less. `python -m bench.cpu_weights`; the model is far larger than the caches unless `--size 100M`.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import click
import torch

from bench.engine import MEDIUM, random_model
from bench.rows import table
from triton_models.engine.engine import Engine
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings

SIZES = {
    "100M": MEDIUM,
    "800M": replace(
        MEDIUM,
        layers=16,
        hidden=2048,
        feed_forward=5504,
        query_heads=16,
        head_dim=128,
        vocabulary=32768,
    ),
}
"""Shapes of ChatGLM by their number of parameters."""

FORMS = ("float32", "stored bfloat16", "stored float16", "bfloat16", "int8", "int4")
"""Of these, `bfloat16` alone computes in 16 bits; stored ones are read in 16, and computed with in 32."""
PROMPT = 256
OTHERS = 16
"""Tokens of the first prompt of a run, and of the others."""

NEW_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One form at one batch size; medians over the rounds."""

    weights: str
    batch: int
    step_ms: float
    cpu_ms: float
    """CPU time of a step, all threads."""
    times: float
    """The first form's `step_ms` over this one's."""
    cpu_times: float
    """The same of `cpu_ms`."""
    prompt_tok_s: float
    """Rate over one prompt of `PROMPT` tokens."""


@dataclass(frozen=True, slots=True)
class _Seconds:
    """What a run took: `step` is wall time, `cpu` CPU time, each of a decode step; `prompt` of a prompt."""

    step: float
    cpu: float
    prompt: float


def make_engine(size: str, form: str, batch: int) -> Engine:
    """Return an engine with random weights, as it is served on a CPU: quantised ones compute in float32."""
    quantization = form if form in QUANTISATIONS else None
    name = form.removeprefix("stored ")
    stored = getattr(torch, name) if name != form else None
    dtype = torch.float32 if quantization or stored else getattr(torch, form)
    model = random_model(
        SIZES[size], dtype=dtype, device=torch.device("cpu"), quantization=quantization, stored=stored
    )
    settings = EngineSettings(max_running=batch, max_context=512, kv_blocks=(batch + 1) * 32, draft_tokens=0)
    return Engine(model, settings)


def measure(
    engines: dict[str, Engine], batches: tuple[int, ...], *, rounds: int, new_tokens: int = NEW_TOKENS
) -> Iterator[WeightRow]:
    """Run every form once a round, one after the other; the first round is not counted."""
    found: dict[tuple[int, str], list[_Seconds]] = {each: [] for each in product(batches, engines)}
    for number in range(rounds + 1):
        for (batch, form), seconds in found.items():
            taken = _run(engines[form], batch, seed=number, new_tokens=new_tokens)
            if number:
                seconds.append(taken)

    def median(batch: int, form: str, part: Callable[[_Seconds], float]) -> float:
        return statistics.median(map(part, found[batch, form]))

    first = next(iter(engines))
    for batch, form in found:
        step, cpu = median(batch, form, lambda each: each.step), median(batch, form, lambda each: each.cpu)
        yield WeightRow(
            weights=form,
            batch=batch,
            step_ms=1000 * step,
            cpu_ms=1000 * cpu,
            times=median(batch, first, lambda each: each.step) / step,
            cpu_times=median(batch, first, lambda each: each.cpu) / cpu,
            prompt_tok_s=PROMPT / median(batch, form, lambda each: each.prompt),
        )


def _run(engine: Engine, batch: int, *, seed: int, new_tokens: int) -> _Seconds:
    """Run `batch` sequences to their end; time the first prompt, and steps in which all of them decode."""
    dice = random.Random(seed)  # noqa: S311 - prompts are no secret
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    began = time.perf_counter()
    prompt = 0.0
    for number in range(batch):
        ids = tuple(dice.choices(range(engine.vocabulary), k=OTHERS if number else PROMPT))
        engine.add(Request(request_id=str(number), prompt_ids=ids, sampling=params, prefix_cache=False))
        if not number:
            engine.step()
            prompt = time.perf_counter() - began
    while (stats := engine.step()) is not None and stats.prefill_tokens:
        pass
    steps: list[tuple[float, float]] = []
    while engine.open_requests == batch:
        before = time.perf_counter(), time.process_time()
        engine.step()
        steps.append((time.perf_counter() - before[0], time.process_time() - before[1]))
    while engine.open_requests:
        engine.step()
    engine.take_outputs()
    step, cpu = (statistics.median(each) for each in zip(*steps, strict=True))
    return _Seconds(step, cpu, prompt)


@click.command()
@click.option("--size", type=click.Choice([*SIZES]), default="800M", show_default=True)
@click.option("--form", "forms", multiple=True, type=click.Choice(FORMS), default=FORMS, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="of which the median counts")
def main(size: str, forms: tuple[str, ...], rounds: int) -> None:
    """Print a row for each form and batch size."""
    batches = (1, 8)
    engines = {form: make_engine(size, form, max(batches)) for form in forms}
    click.echo(table(WeightRow, measure(engines, batches, rounds=rounds)))


if __name__ == "__main__":
    main()
