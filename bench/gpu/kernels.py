"""Checks and times the kernels around attention on a CUDA device: `python -m bench.gpu.kernels`.

`--interpret` runs the whole flow on the CPU, with tiny shapes in Triton's interpreter: its times are
meaningless.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if "--interpret" in sys.argv:
    # Must be set before triton is first imported, which reads it.
    os.environ["TRITON_INTERPRET"] = "1"

import click
import torch
import triton
from torch.nn import functional

from bench.gpu.product_chain import Chain
from bench.gpu.product_search import Compilers, Search, text_of
from bench.gpu.products import CHATGLM3, TINY, Operands, Shape, products
from bench.gpu.report import Results, guarded, print_table
from bench.gpu.sampling_cases import LIMITS, Rows
from bench.gpu.timing import microseconds, terabytes_per_second
from triton_models.engine.kernels import truncation
from triton_models.engine.kernels.elementwise import norm, swiglu
from triton_models.engine.kernels.linear import Tiling

if TYPE_CHECKING:
    from collections.abc import Callable

_EPS = 1e-5
_TRUNCATION_CONSTANTS = ((4096, 8), (4096, 16), (8192, 16))
"""Number of logits that a program loads at once, and number of warps."""


def rate_of(text: str, size: int) -> str:
    """Return microseconds with the GB/s to which they correspond."""
    return text if text == "err" else f"{text} ({size / float(text) / 1e3:.0f})"


def check_products(shape: Shape, operands: Operands, tilings: dict[str, Tiling], results: Results) -> None:
    """Print the relative errors of the products against float64."""
    print("\nrelative errors of the products, at", *shape.rows, "rows")
    for product in products(shape):
        tiling = tilings[product.name]
        errors = [
            guarded(
                results,
                f"error {product.name} {rows}",
                lambda: f"{operands.error(product, rows, tiling):.1e}",  # noqa: B023
            )
            for rows in shape.rows
        ]
        print(product.name, *errors)


def time_products(shape: Shape, operands: Operands, search: Search, results: Results) -> None:
    """Print each product's microseconds (GB/s), ours and the library's, and the sums over a step."""
    table = []
    ours, library = dict.fromkeys(shape.rows, 0.0), dict.fromkeys(shape.rows, 0.0)
    for product in products(shape):
        tiling = search.best[product.name]
        row = [f"{product.name} {text_of(tiling)}"]
        for rows in shape.rows:
            mine = search.times.get((product.name, tiling, rows), float("nan"))
            label = f"library {product.name} {rows}"
            text = guarded(results, label, partial(operands.time_library, product, rows))
            ours[rows] += mine * product.count
            library[rows] += (float("nan") if text == "err" else float(text)) * product.count
            row.append(f"{rate_of(f'{mine:.1f}', product.bytes)} / {rate_of(text, product.bytes)}")
        table.append(row)
    table.append(
        ["sum of a step, ms", *(f"{ours[rows] / 1e3:.3f} / {library[rows] / 1e3:.3f}" for rows in shape.rows)]
    )
    print_table(
        "products, us (GB/s), ours with what is fused / library bare; outputs x keys/splits/warps/stages",
        ["product", *(f"{rows} rows" for rows in shape.rows)],
        table,
    )


def time_chain(shape: Shape, chain: Chain, compilers: Compilers, results: Results) -> None:
    """Print the microseconds of a step without attention, with the library's products and with ours."""
    compilers.compile(chain.jobs())
    table = [
        [
            str(rows),
            guarded(results, f"chain library {rows}", partial(chain.time_library, rows)),
            guarded(results, f"chain {rows}", partial(chain.time_kernels, rows)),
        ]
        for rows in shape.rows
    ]
    print_table("a step without attention, us", ["rows", "library", "ours"], table)


def time_rows(shape: Shape, operands: Operands, results: Results) -> None:
    """Print the errors, microseconds and GB/s of the norm and of the gate (SwiGLU)."""
    weight = torch.ones(shape.width, device=shape.device)
    table = []
    for rows in shape.token_rows:
        hidden = operands.random(rows, shape.width)
        gate_up = operands.random(rows, 2 * shape.ffn)

        def norm_error() -> str:
            exact = functional.rms_norm(hidden.double(), weight.shape, weight.double(), _EPS)  # noqa: B023
            normed = norm(hidden, weight, _EPS)  # noqa: B023
            return f"{float((normed.double() - exact).norm() / exact.norm()):.1e}"

        def gate_error() -> str:
            gate, up = gate_up.double().chunk(2, dim=-1)  # noqa: B023
            exact = functional.silu(gate) * up
            return f"{float((swiglu(gate_up).double() - exact).norm() / exact.norm()):.1e}"  # noqa: B023

        def run_norm() -> None:
            norm(hidden, weight, _EPS)  # noqa: B023

        def run_gate() -> None:
            swiglu(gate_up)  # noqa: B023

        row = [str(rows)]
        for label, error, run, size in (
            ("norm", norm_error, run_norm, 2 * hidden.nbytes),
            ("swiglu", gate_error, run_gate, gate_up.nbytes * 3 // 2),
        ):
            row.append(guarded(results, f"{label} error {rows}", error))
            timed = guarded(results, f"{label} {rows}", partial(microseconds, [run] * 20, shape.device))
            row.append(rate_of(timed, size))
        table.append(row)
    print_table(
        "norm and gate, us (GB/s), data in the cache where it fits",
        ["rows", "norm error", "norm", "swiglu error", "swiglu"],
        table,
    )


def time_sampling(shape: Shape, results: Results) -> None:
    """Print the microseconds of sampling, and how many draws differ from those of the sampler for CPUs."""
    table = []
    for limits in LIMITS:
        constants = _TRUNCATION_CONSTANTS if limits != "all tokens" else _TRUNCATION_CONSTANTS[:1]
        for rows in shape.sampled_rows:
            for dtype in {shape.dtype, torch.float32}:
                case = Rows.make(shape, rows, limits, dtype)
                name = f"{limits}, {rows}, {str(dtype).removeprefix('torch.')}"
                row = [name]
                for block, warps in constants:
                    truncation._BLOCK, truncation._WARPS = block, warps  # noqa: SLF001 - to find the best
                    label = f"{name} {block}/{warps}"
                    row.append(guarded(results, label, partial(case.time, shape.device)))
                row += [""] * (1 + len(_TRUNCATION_CONSTANTS) - len(row))
                row.append(guarded(results, f"differing {name}", case.differing))
                table.append(row)
    print_table(
        "sampling, us",
        ["limits, rows", *(f"{block}/{warps}" for block, warps in _TRUNCATION_CONSTANTS), "differ"],
        table,
    )


@click.command()
@click.option("--interpret", is_flag=True, help="tiny, on CPU, by Triton's interpreter")
@click.option("--only", type=click.Choice(["products", "rows", "sampling"]), multiple=True)
@click.option("--seconds", default=45.0, show_default=True, help="when the coarse search ends")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="where to keep all figures")
def main(*, interpret: bool, only: tuple[str, ...], seconds: float, output: Path | None) -> None:
    """Check the kernels against float64, then time them."""
    began = time.monotonic()
    shape = TINY if interpret else CHATGLM3
    torch.manual_seed(0)
    results: Results = {}
    operands = Operands(shape)
    rate = terabytes_per_second(shape.device, 2**20 if interpret else 2**31)
    name = "interpreter" if interpret else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, copy {rate:.2f} TB/s", flush=True)
    best: dict[str, Tiling] = {}

    def run_products() -> None:
        compilers = Compilers(shape)
        try:
            search = Search(shape, operands, compilers, began + seconds, results)
            search.run()
            best.update(search.best)
            print(f"[searched after {time.monotonic() - began:.0f} s]", flush=True)
            check_products(shape, operands, best, results)
            time_products(shape, operands, search, results)
            time_chain(shape, Chain(shape, operands, best), compilers, results)
        finally:
            compilers.close()

    parts: dict[str, Callable[[], None]] = {
        "products": run_products,
        "rows": partial(time_rows, shape, operands, results),
        "sampling": partial(time_sampling, shape, results),
    }
    for part, run in parts.items():
        if not only or part in only:
            guarded({}, part, run)
            print(f"[{part} done after {time.monotonic() - began:.0f} s]", flush=True)
    constants = {product: asdict(tiling) for product, tiling in best.items()}
    print("\nbest constants:", json.dumps(constants))
    if output is not None:
        output.write_text(
            json.dumps({"constants": constants, "figures": results}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
