"""Checks and times the attention kernels on a CUDA device: `python -m bench.gpu.attention`.

`--interpret` runs the whole flow on the CPU, with tiny shapes in Triton's interpreter: its times are
meaningless.
"""

import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "--interpret" in sys.argv:
    # Must be set before triton is first imported, which reads it.
    os.environ["TRITON_INTERPRET"] = "1"

import click
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.attention_cases import (
    Cache,
    Decode,
    Prefill,
    Rotation,
    check_decode,
    check_prefill,
    check_rotation,
    compile_kernel,
)
from bench.gpu.attention_setup import CHATGLM3, TINY, Setup
from bench.gpu.report import Results, guarded, print_table
from bench.gpu.timing import microseconds, terabytes_per_second
from triton_models.engine.kernels.attention_decode import DecodePlan
from triton_models.engine.kernels.attention_prefill import PrefillConfig

if TYPE_CHECKING:
    from collections.abc import Callable

EXTRA = (1, 66, 198, 264)
"""Other numbers of extra programs."""


def compile_all(setup: Setup) -> None:
    """Fill the compiler's cache from several processes, since each kernel keeps a core busy for seconds."""
    kernels = [*setup.decode_plans, *setup.prefill_configs, None]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn")) as pool:
        for kernel, outcome in [(each, pool.submit(compile_kernel, setup, each)) for each in kernels]:
            if outcome.exception() is not None:
                print(f"! compiling {kernel}: {outcome.exception()}")


def check(setup: Setup, cache: Cache, results: Results) -> None:
    """Print each kernel's error against float64, or whether it equals the plain operation bitwise."""
    print("\nchecks (relative error by norms)")
    for decode in setup.decode_plans:
        label = f"decode {decode.tile}/{decode.warps}/{decode.stages}"
        print(label, guarded(results, label, partial(check_decode, setup, cache, decode)))
    for prefill in setup.prefill_configs:
        label = f"prefill {name_of(prefill)}"
        print(label, guarded(results, label, partial(check_prefill, setup, cache, prefill)))
    print("rotate_store", guarded(results, "rotate_store", partial(check_rotation, setup, cache)))


def time_launches(step: Decode | Prefill | Rotation, *constants: Any) -> float:
    """Return the microseconds that one launch of the step takes."""
    return microseconds(step.launches(*constants), step.device)


def time_decode(setup: Setup, cache: Cache, results: Results, rate: float) -> None:
    """Print the microseconds that one layer takes, by what the decodes are divided among.

    First of equal lengths; then of different ones, as `bench.steady` has them, alone and beside prompts,
    where the other rows of a captured step are none of decodes.
    """
    first, *others = setup.decode_plans
    plans = [first, *(replace(first, extra=each) for each in (*EXTRA, None)), *others]
    rows = []

    def add(case: str, lengths: list[int]) -> None:
        step, read = Decode(setup, cache, lengths), setup.token_bytes * sum(lengths)
        times = [
            guarded(results, f"decode {case} {plan_name(plan)}", partial(time_launches, step, plan))
            for plan in plans
        ]
        rows.append([case, f"{read / rate / 1e6:.1f}", *times])

    for batch in setup.batches:
        for context in setup.contexts:
            add(f"{batch} x {context}", [context] * batch)
    median, longest, most = setup.contexts[0], setup.contexts[-1], setup.batches[-1]
    dice = random.Random(0)  # noqa: S311 - a length is no secret
    drawn = [max(1, min(longest, round(median * dice.lognormvariate(0.0, 0.7)))) for _ in range(most)]
    for batch in setup.batches:
        add(f"{batch} different", drawn[:batch])
    for batch in setup.batches[:-1]:
        add(f"{batch} different of {most}", drawn[:batch] + [0] * (most - batch))
    print_table(
        "decode, us a layer; columns: tile/warps/stages + extra programs of a KV head",
        ["batch x context", "floor", *map(plan_name, plans)],
        rows,
    )


def plan_name(plan: DecodePlan) -> str:
    """Return what a column is called."""
    divided = "by length" if plan.extra is None else f"+{plan.extra}"
    return f"{plan.tile}/{plan.warps}/{plan.stages} {divided}"


def time_prefill(setup: Setup, cache: Cache, results: Results) -> None:
    """Print the microseconds that one layer takes, and its TFLOP/s."""
    rows = []
    for case in setup.prompts:
        sequences, offset, count = case
        step = Prefill(setup, cache, case)
        pairs = sequences * sum(range(offset + 1, offset + count + 1))
        flops = 4 * setup.head_dim * setup.query_heads * pairs
        row = [f"{sequences} x {count} after {offset}"]
        for config in setup.prefill_configs:
            label = f"prefill {row[0]} {name_of(config)}"
            text = guarded(results, label, partial(time_launches, step, config))
            row.append(text if text == "err" else f"{text} ({flops / float(text) / 1e6:.0f})")
        row.append(guarded(results, f"sdpa {row[0]}", partial(time_sdpa, setup, case)))
        rows.append(row)
    names = map(name_of, setup.prefill_configs)
    print_table(
        "prefill, us a layer (TFLOP/s); columns: rows x keys/warps/stages", ["prompts", *names, "SDPA"], rows
    )


def name_of(config: PrefillConfig | str) -> str:
    """Return what a column is called."""
    if isinstance(config, str):
        return config
    return f"{config.rows}x{config.keys}/{config.warps}/{config.stages}{' blocks' * config.in_blocks}"


def time_sdpa(setup: Setup, case: tuple[int, int, int]) -> float | str:
    """Return the microseconds that torch's own attention over contiguous keys takes, for comparison."""
    sequences, offset, count = case
    if offset:
        return "-"
    shape = (sequences, setup.query_heads, count, setup.head_dim)
    queries, keys, values = (
        torch.empty(shape, dtype=setup.dtype, device=setup.device).normal_() for _ in range(3)
    )

    def launch() -> None:
        scaled_dot_product_attention(queries, keys, values, is_causal=True)

    return microseconds([launch] * setup.layers, setup.device)


def time_rotation(setup: Setup, cache: Cache, results: Results) -> None:
    """Print the microseconds that one layer takes, and its GB/s."""
    rows = []
    for tokens in setup.rotated:
        step = Rotation(setup, cache, tokens)
        label = f"rotate {tokens}"
        text = guarded(results, label, partial(time_launches, step))
        rows.append([str(tokens), text, "-" if text == "err" else f"{step.bytes / float(text) / 1e3:.0f}"])
    print_table("rotate_store, us a layer", ["tokens", "us", "GB/s"], rows)


@click.command()
@click.option("--interpret", is_flag=True, help="tiny, on CPU, by Triton's interpreter")
@click.option("--only", type=click.Choice(["check", "decode", "prefill", "rotate"]), multiple=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="where to keep all figures")
def main(*, interpret: bool, only: tuple[str, ...], output: Path | None) -> None:
    """Check the kernels against float64, then time them."""
    began = time.monotonic()
    setup = TINY if interpret else CHATGLM3
    torch.manual_seed(0)
    results: Results = {}
    compile_all(setup)
    name, copied = "interpreter", 2**20
    if not interpret:
        name, copied = torch.cuda.get_device_properties(setup.device).name, 2**31
    rate = terabytes_per_second(setup.device, copied)
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, copy {rate:.2f} TB/s")
    blocks = max(setup.batches) * -(-max(setup.contexts) // setup.block_size) + 1
    cache = Cache(setup, max(blocks, 256))
    parts: dict[str, Callable[[], None]] = {
        "check": partial(check, setup, cache, results),
        "decode": partial(time_decode, setup, cache, results, rate),
        "prefill": partial(time_prefill, setup, cache, results),
        "rotate": partial(time_rotation, setup, cache, results),
    }
    for part, run in parts.items():
        if not only or part in only:
            guarded({}, part, run)
            print(f"[{part} done after {time.monotonic() - began:.0f} s]", flush=True)
    if output is not None:
        output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
