"""Checks the engine's answers on a GPU, and profiles its steps: `python -m bench.gpu.check_engine`."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch

from bench.engine import random_model
from bench.gpu.checkpoint import CHATGLM3_6B
from bench.gpu.report import Results, guarded
from triton_models.checkpoint import load_model
from triton_models.engine.backend import PLAIN, Backend, choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up

_KERNELS_SHOWN = 12
_PROMPT_TOKENS = 1024
"""Number of tokens in the profiled step of prompts."""

_DECODE_STEPS = 10


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """Run the requests to their end; return the token ids by request."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.open_requests:
        engine.step()
        for output in engine.take_outputs():
            if output.error:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
    return tokens


def check_golden(directory: Path, dtype: torch.dtype, device: torch.device, backend: Backend) -> str:
    """Compare greedy tokens with those of the original code."""
    cases = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["cases"]
    engine = Engine(load_model(directory, dtype, device), EngineSettings(max_running=16), backend=backend)
    found = answers(
        engine,
        [
            Request(
                request_id=str(number),
                prompt_ids=tuple(case["input_ids"]),
                sampling=SamplingParams(temperature=0.0, max_tokens=len(case["greedy_ids"])),
            )
            for number, case in enumerate(cases)
        ],
    )
    equal = sum(found[str(number)] == case["greedy_ids"] for number, case in enumerate(cases))
    return f"{equal} of {len(cases)} greedy answers equal the original's"


def check_sampled(directory: Path, device: torch.device, backend: Backend) -> str:
    """Compare sampled tokens of a mixed batch with those of the plain backend, in float32."""
    model = load_model(directory, torch.float32, device)
    generator = torch.Generator().manual_seed(7)
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=tuple(
                torch.randint(model.vocab_size, (1 + number * 3,), generator=generator).tolist()
            ),
            sampling=SamplingParams(
                temperature=(0.0, 0.7, 1.0)[number % 3],
                top_p=(1.0, 0.8)[number % 2],
                top_k=(0, 0, 0, 20)[number % 4],
                seed=number,
                max_tokens=40,
            ),
        )
        for number in range(64)
    ]
    settings = EngineSettings(max_running=48, max_batched_tokens=100, block_size=16, kv_blocks=200)
    wanted = answers(Engine(model, settings, backend=PLAIN), requests)
    found = answers(Engine(model, settings, backend=backend), requests)
    equal = sum(wanted[key] == found[key] for key in wanted)
    return f"{equal} of {len(wanted)} mixed sampled answers equal the plain backend's"


def profile(model: CausalModel, backend: Backend, batch: int, *, prompt: int) -> None:
    """Print the kernels of a step of prompts, and of steps in which all sequences decode."""
    # One step at a time: otherwise the kernels of a step launched ahead would be counted, too.
    settings = EngineSettings(max_running=batch, max_batched_tokens=max(_PROMPT_TOKENS, 2 * batch))
    # At least half of each step is left for prompts, so no sequence ends before the last one decodes.
    new_tokens = _DECODE_STEPS + 2 + 2 * (1 + batch * prompt // settings.max_batched_tokens)
    settings = replace(settings, max_context=prompt + new_tokens)
    engine = Engine(model, settings, backend=replace(backend, overlap=False))
    warm_up(engine)
    generator = torch.Generator().manual_seed(batch)
    for number in range(batch):
        ids = torch.randint(model.vocab_size, (prompt,), generator=generator).tolist()
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=new_tokens)
        engine.add(Request(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling))
    print_kernels(f"prompts, batch {batch}", engine.step, 1)
    while (stats := engine.step()) is not None and stats.decode_tokens < batch:
        pass
    print_kernels(f"decodes, batch {batch}", engine.step, _DECODE_STEPS)


def print_kernels(title: str, work: Callable[[], object], times: int) -> None:
    """Print the kernels of `work`, with times per call, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"{title}: {total / 1000 / times:.3f} ms of kernels a step")
    for row in rows[:_KERNELS_SHOWN]:
        print(f"  {row.device_time_total / 1000 / times:8.4f} ms {row.count / times:7.1f} x {row.key[:80]}")


@click.command()
@click.option("--golden", type=click.Path(exists=True, path_type=Path), multiple=True, help="a checkpoint")
@click.option("--profile", "batches", type=int, multiple=True, help="sequences that decode together")
@click.option("--prompt", default=448, show_default=True, help="tokens of each, when profiling")
def main(*, golden: tuple[Path, ...], batches: tuple[int, ...], prompt: int) -> None:
    """Compare the engine's answers with the original code's, then print which kernels its steps consist of.

    Profiles are of ChatGLM3-6B's shape with random weights: no checkpoint of that size is needed.
    """
    device = torch.device("cuda")
    backend = choose_backend(device, torch.bfloat16)
    click.echo(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; {backend.reason}")
    results: Results = {}
    for directory in golden:
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{directory.name} {dtype}"
            check = partial(check_golden, directory, dtype, device, backend)
            click.echo(f"{label}: {guarded(results, label, check)}")
        label = f"{directory.name} torch.float32, sampled"
        check = partial(check_sampled, directory, device, backend)
        click.echo(f"{label}: {guarded(results, label, check)}")
    if batches:
        model = random_model(CHATGLM3_6B, dtype=torch.bfloat16, device=device)
        for batch in batches:
            profile(model, backend, batch, prompt=prompt)


if __name__ == "__main__":
    main()
