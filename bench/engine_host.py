"""Measures the CPU time per token that the engine's own thread needs, with a device that costs nothing.

The whole engine runs, but no model in steps of decodes. What is measured is scheduling, staging and what
becomes of the results: time in which Python's lock is held beside the device.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from triton_models.checkpoint import load_model
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.graphs import DeviceStep
from triton_models.engine.runner import Runner
from triton_models.engine.sampler import SamplerOutputs
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Step

_PROMPT = 10
_TOKEN = 300
"""What is in every prompt and every answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHostRow:
    """One measurement of the engine's thread."""

    sequences: int
    steps: int
    microseconds: float
    """CPU time per token, the median of the steps."""


def measure(checkpoint: Path, sequences: tuple[int, ...], *, new_tokens: int) -> Iterator[EngineHostRow]:
    """Measure each number of sequences that decode together."""
    for number in sequences:
        seconds = _seconds_of_steps(checkpoint, number, new_tokens)
        yield EngineHostRow(sequences=number, steps=len(seconds), microseconds=1e6 * median(seconds) / number)


def _seconds_of_steps(checkpoint: Path, number: int, new_tokens: int) -> list[float]:
    model = load_model(checkpoint, torch.float32, torch.device("cpu"))
    blocks = number * (2 + (_PROMPT + new_tokens) // 16)
    settings = EngineSettings(
        max_running=number, max_batched_tokens=max(number, 1024), kv_blocks=blocks, draft_tokens=0
    )
    engine = Engine(model, settings, backend=replace(PLAIN, overlap=True))
    sampling = SamplingParams(max_tokens=new_tokens)
    prompt = (_TOKEN,) * _PROMPT
    engine.add(
        *(Request(request_id=str(each), prompt_ids=prompt, sampling=sampling) for each in range(number))
    )
    seconds = []
    with _no_device(number, model.vocab_size):
        while engine.open_requests:
            began = time.thread_time()
            stats = engine.step()
            engine.take_outputs()
            spent = time.thread_time() - began
            if stats is not None and stats.decode_tokens == number:
                seconds.append(spent)
    return seconds


@contextmanager
def _no_device(number: int, vocabulary: int) -> Iterator[None]:
    """Let steps of decodes alone find their logits and tokens ready; prompts are computed as always."""
    logits = torch.zeros(number, vocabulary)
    tokens = torch.tensor([[_TOKEN], [1], [1]]).repeat(1, number)
    sample = Runner.sample

    def sampled(runner: Runner, step: Step) -> None:
        if step.told:
            sample(runner, step)
        else:
            step.staged = step.logits = None
            step.outputs = SamplerOutputs(tokens[:, : len(step.sampling)], None, None)

    with patch.object(DeviceStep, "decode", lambda *_: logits), patch.object(Runner, "sample", sampled):
        yield
