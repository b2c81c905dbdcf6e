"""Measures what a model takes of a GPU: its weights, and the most while one request alone is computed.

Each kind of weights has a process of its own. The KV cache is just large enough for the request, and the
engine has no room for a second one. `python -m bench.memory`
"""

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import click
import torch

from bench.engine import random_model
from bench.gpu.checkpoint import SHAPES
from bench.quality import NONE, quantizations_option
from bench.rows import table
from triton_models.engine.backend import choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.errors import SettingsError
from triton_models.serving.build import choose_dtype

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most from the engine's start to the end of a request, in bytes."""

    tensors: int
    """Of torch's tensors, the weights among them."""
    device: int
    """No longer free on the GPU: what torch's allocator keeps, graphs, kernels, the driver's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One kind of weights, in GB of 10^9 bytes."""

    model: str
    weights: str
    load_gb: float
    """Tensors after loading."""
    prompt_gb: float
    """The most tensors, until a prompt is computed."""
    output_gb: float
    """The most tensors, until an answer to a prompt of one token is complete."""
    prompt_device_gb: float
    """As `prompt_gb`: of the whole GPU, if nothing else uses it."""
    output_device_gb: float


def measure(shape: str, quantization: str | None, *, device: str, prompt: int, output: int) -> MemoryRow:
    """Measure a random model of this shape, in this process, which should have used no GPU before.

    Args:
        shape: a key of `SHAPES`.
        quantization: of its weights; None: none.
        device: a GPU.
        prompt: tokens of the prompt, which is followed by one token.
        output: tokens of the answer, which follows a prompt of one token.

    Raises:
        SettingsError: the GPU is not made for such weights.
    """
    where = torch.device(device)
    dtype, _ = choose_dtype("auto", where, quantization)
    # ChatGLM3-6B's own context is 8,192 tokens with the prompt, ChatGLM2-6B's 32,768.
    config = replace(SHAPES[shape], positions=max(SHAPES[shape].positions, prompt + 1, output + 1))
    with torch.inference_mode():
        model = random_model(config, dtype=dtype, device=where, quantization=quantization)
        loaded = torch.cuda.memory_allocated(where)
        prompted = peak(model, prompt, 1)
        answered = peak(model, 1, output)
    return MemoryRow(
        model=f"random {shape}",
        weights=quantization or str(dtype).removeprefix("torch."),
        load_gb=loaded / _GB,
        prompt_gb=prompted.tensors / _GB,
        output_gb=answered.tensors / _GB,
        prompt_device_gb=prompted.device / _GB,
        output_device_gb=answered.device / _GB,
    )


def peak(model: CausalModel, prompt: int, output: int) -> Peak:
    """Start an engine for one request of so many tokens, run the request, and return the most it took.

    Raises:
        RuntimeError: the request failed, or ended early.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    size = choose_backend(model.device, model.dtype).block_size
    settings = EngineSettings(
        max_running=1,
        max_context=prompt + output,
        block_size=size,
        kv_blocks=-(-(prompt + output) // size),
    )
    engine = Engine(model, settings)
    ids = torch.randint(model.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=output)
    engine.add(Request(request_id="alone", prompt_ids=tuple(ids), sampling=params))
    answered = 0
    while engine.open_requests:
        engine.step()
        for told in engine.take_outputs():
            if told.error is not None:
                raise RuntimeError(told.error)
            answered += told.token_id is not None
    if answered != output:
        raise RuntimeError(f"{answered} tokens instead of {output}")
    # While the engine is there: its graphs are the device's, not the allocator's.
    free, total = torch.cuda.mem_get_info(model.device)
    return Peak(tensors=torch.cuda.max_memory_allocated(model.device), device=total - free)


def measure_each(
    shapes: Sequence[str], quantizations: Sequence[str], *, device: str, prompt: int, output: int
) -> list[MemoryRow]:
    """Measure each in a process of its own; what the GPU is not made for is said, and left out."""
    rows = []
    for shape in shapes:
        for name in quantizations:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                chosen = None if name == NONE else name
                row = process.submit(measure, shape, chosen, device=device, prompt=prompt, output=output)
                try:
                    rows.append(row.result())
                except SettingsError as error:
                    click.echo(f"left out: {error}", err=True)
    return rows


@click.command()
@click.option(
    "--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True, default=("6b",), show_default=True
)
@quantizations_option
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--prompt", type=click.IntRange(1), default=2048, show_default=True, help="tokens")
@click.option(
    "--output", type=click.IntRange(1), default=8192, show_default=True, help="tokens; each takes a step"
)
def main(
    shapes: tuple[str, ...], quantizations: tuple[str, ...], device: str, prompt: int, output: int
) -> None:
    """Print a table of GB (10^9 bytes) for random weights in the shape of ChatGLM3-6B or GLM-4-9B."""
    if torch.device(device).type != "cuda":
        raise click.UsageError(f"--device {device}: only a GPU's memory is measured")
    rows = measure_each(shapes, quantizations, device=device, prompt=prompt, output=output)
    click.echo(table(MemoryRow, rows))


if __name__ == "__main__":
    main()
