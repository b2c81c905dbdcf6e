"""Measures the engine alone, in this process: tokens per second and milliseconds per step by batch size."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.linear import Linear
from triton_models.engine.models import CausalModel
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.models.positions import Rope
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings

_INITIAL_SPREAD = 0.02

MEDIUM = DecoderConfig(
    layers=12,
    hidden=768,
    feed_forward=2048,
    query_heads=12,
    kv_heads=2,
    head_dim=64,
    vocabulary=16384,
    positions=2048,
    epsilon=1e-5,
    rope=Rope(share=0.5, base=10_000.0),
    qkv_bias=True,
)
"""About 100 million parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One measurement; medians over the rounds."""

    model: str
    batch: int
    sampling: str
    tokens_per_second: float
    step_ms: float


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "t=0.8 top_p=0.8": SamplingParams(temperature=0.8, top_p=0.8),
}


def random_model(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    stored: torch.dtype | None = None,
) -> Decoder:
    """Return a model of this shape with random weights, of which only the speed is meaningful."""
    form = Linear if quantization is None else QUANTISATIONS[quantization]
    model = Decoder(config, dtype=dtype, device=device, form=form, stored=stored)
    generator = torch.Generator(device).manual_seed(0)
    norms = [model.final_norm]
    matrices = [model.embedding, model.head.place]
    for layer in model.layers:
        norms += [layer.input_norm, layer.feed_forward_norm]
        matrices += [each.place for each in (layer.qkv, layer.attention_out, layer.up, layer.down)]
        if layer.qkv.bias is not None:
            matrices.append(layer.qkv.bias)
    for norm in norms:
        norm.weight.fill_(1.0)
    for matrix in matrices:
        # Drawn in float32 whatever the dtype, so that each has the same weights.
        weights = torch.empty(matrix.shape, dtype=torch.float32, device=device)
        matrix.copy_(weights.normal_(std=_INITIAL_SPREAD, generator=generator))
    return model


def models(checkpoint: Path) -> Iterator[tuple[str, CausalModel]]:
    """Yield the measured models by name: a real checkpoint, and the medium random model in both dtypes."""
    cpu = torch.device("cpu")
    yield checkpoint.name, load_model(checkpoint, torch.float32, cpu)
    for dtype in (torch.float32, torch.bfloat16):
        yield (
            f"random 100M {str(dtype).removeprefix('torch.')}",
            random_model(MEDIUM, dtype=dtype, device=cpu),
        )


def measure(
    models: Iterable[tuple[str, CausalModel]],
    batches: tuple[int, ...],
    *,
    prompt: int,
    new_tokens: int,
    rounds: int,
) -> Iterator[EngineRow]:
    """Run every model, of which each has a name, at every batch size, greedy and sampled."""
    for name, model in models:
        engine = Engine(model, EngineSettings(max_running=max(batches), max_context=prompt + new_tokens))
        for batch, (label, sampling) in itertools.product(batches, SAMPLINGS.items()):
            seconds = [
                _decode(
                    engine, model.vocab_size, batch, sampling=sampling, prompt=prompt, new_tokens=new_tokens
                )
                for _ in range(rounds + 1)
            ]
            taken = statistics.median(seconds[1:])  # the first is the warm-up
            yield EngineRow(
                model=name,
                batch=batch,
                sampling=label,
                tokens_per_second=batch * (new_tokens - 1) / taken,
                step_ms=1000 * taken / (new_tokens - 1),
            )


def _decode(
    engine: Engine, vocabulary: int, batch: int, *, sampling: SamplingParams, prompt: int, new_tokens: int
) -> float:
    """Return the seconds that `new_tokens - 1` decode steps of `batch` sequences take, without prefill."""
    generator = torch.Generator().manual_seed(1)
    for number in range(batch):
        ids = torch.randint(vocabulary, (prompt,), generator=generator).tolist()
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, seed=number, max_tokens=new_tokens
        )
        engine.add(Request(request_id=str(number), prompt_ids=tuple(ids), sampling=params))
    _step_until(engine, lambda: engine.stats().waiting == 0)
    while (stats := engine.step()) is not None and stats.prefill_tokens:
        pass
    began = time.perf_counter()
    _step_until(engine, lambda: engine.open_requests == 0)
    taken = time.perf_counter() - began
    engine.take_outputs()
    return taken


def _step_until(engine: Engine, done: Callable[[], bool]) -> None:
    while not done():
        engine.step()
