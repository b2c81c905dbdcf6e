"""Measures the engine alone, in this process: milliseconds per decode step by batch size, in one context."""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.engine import random_model
from bench.load_rows import percentile
from triton_models.checkpoint import read_config
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings

_STEPS = 64
_MAX_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One batch size. Times are milliseconds; `context` is the mean context length of the measured steps."""

    batch: int
    masked: int
    """Sequences of the batch that have a token mask."""
    context: int
    step_ms_p50: float
    step_ms_p99: float
    decode_tok_s: float
    prefill_tok_s: float
    """Rate over all prompts, from the first step to the last one that computed prompt tokens."""


class _Everything:
    """A token mask that allows every token, and takes next to no time: what remains is the engine's own."""

    def fill(self, words: Tensor) -> None:
        """Allow every token."""
        words.fill_(-1)

    def accept(self, token_id: int) -> None:
        """Allow what follows any token."""


def measure_steps(
    checkpoint: Path,
    batches: tuple[int, ...],
    *,
    device: str,
    dtype: str,
    context: int = 512,
    masked: tuple[int, ...] = (0,),
) -> Iterator[StepRow]:
    """Measure a model of the checkpoint's shape with random weights at each batch size.

    Each is measured with every number of `masked` sequences among them that is not larger.
    """
    model = random_model(read_config(checkpoint), dtype=getattr(torch, dtype), device=torch.device(device))
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
    for batch in batches:
        for some in masked:
            if some <= batch:
                _decode(engine, model.vocab_size, batch, some, prompt=prompt, steps=4)  # not counted
                yield _row(
                    batch, some, context, *_decode(engine, model.vocab_size, batch, some, prompt=prompt)
                )


def _row(batch: int, masked: int, context: int, prefill_s: float, steps_s: list[float]) -> StepRow:
    milliseconds = [1000 * each for each in steps_s]
    return StepRow(
        batch=batch,
        masked=masked,
        context=context,
        step_ms_p50=statistics.median(milliseconds),
        step_ms_p99=percentile(milliseconds, 99),
        decode_tok_s=batch / statistics.median(steps_s),
        prefill_tok_s=batch * (context - _STEPS // 2) / prefill_s,
    )


def _decode(
    engine: Engine, vocabulary: int, batch: int, masked: int, *, prompt: int, steps: int = _STEPS
) -> tuple[float, list[float]]:
    """Return the seconds for all prompts, and those of each step that only decoded: about `steps` of them."""
    dice = torch.Generator().manual_seed(batch)
    for number in range(batch):
        ids = torch.randint(vocabulary, (prompt,), generator=dice).tolist()
        mask = _Everything() if number < masked else None
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=steps, mask=mask)
        # Without the prefix cache: the prompts are those of the steps that were not counted.
        engine.add(
            Request(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling, prefix_cache=False)
        )
    began = time.perf_counter()
    prefill_s = 0.0
    decodes: list[float] = []
    while True:
        before = time.perf_counter()
        stats = engine.step()
        now = time.perf_counter()
        if stats is None:
            break
        if stats.prefill_tokens:
            prefill_s = now - began
        elif engine.open_requests == batch:
            decodes.append(now - before)
    engine.take_outputs()
    return prefill_s, decodes[1:]  # the first still waits for the prompts' work
