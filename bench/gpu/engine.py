"""The engine alone on a GPU: is it right, how long is a step, and where does the time go.

    python bench/gpu/engine.py --golden tests/golden/chatglm3 --batches 1,32,128,256 --profile 1,128

Random weights of ChatGLM3-6B's shape; nothing needs a network or a checkpoint of that size.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.engine import random_model
from triton_models.checkpoint import load_model
from triton_models.engine.backend import PLAIN, Backend, choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.models.chatglm import ChatGLMConfig
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up

CHATGLM3_6B = ChatGLMConfig(
    num_layers=28,
    hidden_size=4096,
    ffn_hidden_size=13696,
    num_attention_heads=32,
    multi_query_group_num=2,
    kv_channels=128,
    padded_vocab_size=65024,
    seq_length=8192,
    layernorm_epsilon=1e-5,
    add_qkv_bias=True,
)


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """Run the requests to their end; token ids by request."""
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
    """Compare greedy tokens with the original code's."""
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
    return f"{directory.name} {dtype}: {equal} of {len(cases)} greedy answers equal the original's"


def check_sampled(directory: Path, device: torch.device, backend: Backend) -> str:
    """Compare sampled tokens of a mixed batch with the plain backend's, in fp32."""
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
    settings = EngineSettings(max_running=48, max_batched_tokens=100, kv_blocks=200)
    wanted = answers(Engine(model, settings, backend=PLAIN), requests)
    found = answers(Engine(model, settings, backend=backend), requests)
    equal = sum(wanted[key] == found[key] for key in wanted)
    return (
        f"{directory.name} float32: {equal} of {len(wanted)} mixed sampled answers equal the plain backend's"
    )


def add_random(engine: Engine, batch: int, prompt: int, new_tokens: int) -> None:
    """Add requests with random prompts."""
    generator = torch.Generator().manual_seed(batch)
    for number in range(batch):
        ids = torch.randint(1000, 60000, (prompt,), generator=generator).tolist()
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=new_tokens)
        engine.add(Request(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling))


def measure(engine: Engine, batch: int, prompt: int, new_tokens: int) -> str:
    """Return a table row: prefill and decode speeds of `batch` sequences."""
    # Those whose prompts come first must not end before the last one decodes.
    add_random(engine, batch, prompt, new_tokens + batch * prompt // engine.settings.max_batched_tokens)
    torch.cuda.synchronize()
    began = time.perf_counter()
    prefill = 0.0
    times = []
    while engine.open_requests:
        stats = engine.step()
        engine.take_outputs()
        if stats is None:
            continue
        if stats.prefill_tokens:
            prefill = time.perf_counter() - began
        elif stats.decode_tokens == batch:
            times.append(1000 * stats.seconds)
    times.sort()
    median = statistics.median(times)
    return (
        f"{batch:5d} {prompt * batch / prefill:10.0f} {median:9.3f} {times[len(times) * 99 // 100]:9.3f}"
        f" {1000 * batch / median:10.0f}"
    )


def profile(engine: Engine, batch: int, prompt: int) -> None:
    """Print what the device does in some decode steps, and in a step of prompts alone."""
    add_random(engine, batch, prompt, 40 + batch * prompt // engine.settings.max_batched_tokens)
    print_kernels(f"prompts, batch {batch}", engine.step, 1)
    while engine.open_requests and (stats := engine.step()) is not None and stats.decode_tokens < batch:
        engine.take_outputs()
    began = time.perf_counter()
    for _ in range(10):
        engine.step()
    print(f"10 steps took {1000 * (time.perf_counter() - began):.2f} ms")
    print_kernels(f"decodes, batch {batch}", engine.step, 10)
    for number in range(batch):
        engine.cancel(str(number))
    while engine.open_requests:
        engine.step()
    engine.take_outputs()


def print_kernels(title: str, work: Callable[[], object], times: int) -> None:
    """Print the kernels of `work`, per call, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"{title}: {total / 1000 / times:.3f} ms of kernels a step")
    for row in rows[:12]:
        print(f"  {row.device_time_total / 1000 / times:8.4f} ms {row.count / times:7.1f} x {row.key[:80]}")


def attempt(work: Callable[[], str | None]) -> None:
    """Do one part; an error costs that part alone."""
    try:
        line = work()
        if line:
            print(line, flush=True)
    except Exception:  # noqa: BLE001 - device time is scarce: the other parts still run
        print(traceback.format_exc()[-1500:], flush=True)


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--golden", type=Path, action="append", default=[])
    parser.add_argument("--batches", default="1,8,32,64,128,256,512")
    parser.add_argument("--profile", default="")
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    backend = choose_backend(device, torch.bfloat16)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; {backend.reason}", flush=True)
    for directory in arguments.golden:
        for dtype in (torch.float32, torch.bfloat16):
            attempt(lambda d=directory, t=dtype: check_golden(d, t, device, backend))  # type: ignore[misc]
        attempt(lambda d=directory: check_sampled(d, device, backend))  # type: ignore[misc]
    batches = [int(each) for each in arguments.batches.split(",") if each]
    if not batches:
        return
    began = time.monotonic()
    model = random_model(CHATGLM3_6B, dtype=torch.bfloat16, device=device)
    settings = EngineSettings(
        max_running=max(batches),
        max_batched_tokens=arguments.max_batched_tokens,
        max_context=2560,
        kv_memory_gib=40,
    )
    engine = Engine(model, settings, backend=backend)
    warm_up(engine)
    print(f"6B-shaped engine ready after {time.monotonic() - began:.1f} s", flush=True)
    print("batch  prefill/s   step ms       p99      tok/s")
    for batch in batches:
        attempt(lambda b=batch: measure(engine, b, arguments.prompt, arguments.new_tokens))  # type: ignore[misc]
    for batch in (int(each) for each in arguments.profile.split(",") if each):
        attempt(lambda b=batch: profile(engine, b, arguments.prompt))  # type: ignore[misc]


if __name__ == "__main__":
    main()
