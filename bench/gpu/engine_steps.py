"""Measures the engine alone, in this process: milliseconds per decode step by batch size, in one context."""

import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.engine import random_model
from gateway.commands.load_rows import percentile
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import AnyToken
from triton_models.families import read_shape

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"temperature": 0.8, "top_p": 0.8},
    "penalties": {"top_k": 50, "repetition_penalty": 1.1, "presence_penalty": 0.2},
}
"""Sampling parameters beside the temperature, by name."""

_STEPS = 64
_MAX_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One batch size. Times are milliseconds; `context` is the mean context length of the measured steps."""

    weights: str
    """A quantisation, or the dtype."""
    batch: int
    masked: int
    """Sequences of the batch that have a token mask."""
    sampling: str
    """One of `SAMPLINGS`."""
    context: int
    step_ms_p50: float
    step_ms_p99: float
    decode_tok_s: float
    prefill_tok_s: float
    """Rate over all prompts, until each has its first token."""


def measure_steps(
    checkpoint: Path,
    batches: tuple[int, ...],
    *,
    device: str,
    dtype: str,
    context: int = 512,
    masked: tuple[int, ...] = (0,),
    quantization: str | None = None,
    samplings: tuple[str, ...] = ("plain",),
) -> Iterator[StepRow]:
    """Measure a model of the checkpoint's shape with random weights at each batch size.

    Each is measured with every number of `masked` sequences among them that is not larger, and with each of
    `samplings`.
    """
    model = random_model(
        read_shape(checkpoint),
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        quantization=quantization,
    )
    settings = EngineSettings(
        max_running=max(batches),
        max_context=context + _STEPS,
        max_batched_tokens=max(_MAX_BATCHED_TOKENS, *batches),
    )
    engine = Engine(model, settings)
    # As serving does: a full collection over all modules takes 80 ms, and would be some step's.
    gc.collect()
    gc.freeze()
    prompt = context - _STEPS // 2
    ask = partial(_requests, vocabulary=model.vocab_size, prompt=prompt)
    _prefill(engine, ask("not counted", batch=1, masked=0, steps=4))
    for batch, some, sampling in product(batches, masked, samplings):
        if some <= batch:
            name = f"{batch}, {some} masked, {sampling}"
            requests = partial(ask, name, batch=batch, masked=some, sampling=sampling)
            # The prompts are in the prefix cache afterwards. So the sequences begin to decode nearly
            # together, and are still all there when the last one does.
            prefill_s = _prefill(engine, requests(steps=4))
            decodes = _decode(engine, requests(steps=_STEPS))
            yield _row((quantization or dtype, sampling), (batch, some, context), prefill_s, decodes)


def _row(
    names: tuple[str, str], sizes: tuple[int, int, int], prefill_s: float, steps_s: list[float]
) -> StepRow:
    (weights, sampling), (batch, masked, context) = names, sizes
    milliseconds = [1000 * each for each in steps_s]
    return StepRow(
        weights=weights,
        batch=batch,
        masked=masked,
        sampling=sampling,
        context=context,
        step_ms_p50=statistics.median(milliseconds),
        step_ms_p99=percentile(milliseconds, 99),
        decode_tok_s=batch / statistics.median(steps_s),
        prefill_tok_s=batch * (context - _STEPS // 2) / prefill_s,
    )


def _requests(
    name: str, *, vocabulary: int, batch: int, masked: int, prompt: int, steps: int, sampling: str = "plain"
) -> list[Request]:
    """Return `batch` requests; the same name gives the same prompts."""
    dice = random.Random(name)  # noqa: S311 - prompts are no secret
    return [
        Request(
            request_id=str(number),
            prompt_ids=tuple(dice.choices(range(vocabulary), k=prompt)),
            sampling=replace(
                SamplingParams(temperature=1.0, seed=number, max_tokens=steps),
                mask=AnyToken() if number < masked else None,
                **SAMPLINGS[sampling],
            ),
        )
        for number in range(batch)
    ]


def _prefill(engine: Engine, requests: list[Request]) -> float:
    """Run requests to their end; return the seconds until all had their first token."""
    for request in requests:
        engine.add(request)
    began = time.perf_counter()
    prefill_s = 0.0
    waiting = {request.request_id for request in requests}
    while engine.open_requests:
        engine.step()
        waiting -= {output.request_id for output in engine.take_outputs()}
        if not waiting and not prefill_s:
            prefill_s = time.perf_counter() - began
    return prefill_s


def _decode(engine: Engine, requests: list[Request]) -> list[float]:
    """Run requests to their end; return the seconds of each step in which all of them decoded."""
    for request in requests:
        engine.add(request)
    decodes: list[float] = []
    while True:
        before = time.perf_counter()
        stats = engine.step()
        now = time.perf_counter()
        if stats is None:
            break
        if not stats.prefill_tokens and engine.open_requests == len(requests):
            decodes.append(now - before)
    engine.take_outputs()
    return decodes[1:]  # the first still waits for the prompts' work
