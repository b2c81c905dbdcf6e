"""Finds the best tiling of each product by measurement."""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from multiprocessing import get_context

from bench.gpu.products import CHATGLM3, Operands, Product, Shape, compile_product, products
from bench.gpu.report import Results, guarded
from triton_models.engine.kernels.linear import Tiling, tiling_for

FINALISTS = 4
Job = tuple[Product, int, Tiling]
"""A variant to compile: a product, the number of rows, and a tiling."""


class Compilers:
    """Processes that fill the compiler's cache, since each variant keeps a core busy for a second or more."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pool = ProcessPoolExecutor(min(14, os.cpu_count() or 1), get_context("spawn"))

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compile all. A variant that fails here fails again when it is measured, and is reported then."""
        if self._shape.device.type != "cuda":
            return
        futures = [
            self._pool.submit(compile_product, self._shape, product, rows, tiling)
            for product, rows, tiling in set(jobs)
        ]
        failed = sum(future.exception() is not None for future in futures)
        print(f"compiled {len(futures)}, {failed} failed", flush=True)

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


def text_of(tiling: Tiling) -> str:
    """Return a tiling in short form: outputs x keys, splits, warps, stages."""
    return f"{tiling.block_n}x{tiling.block_k}/{tiling.splits}s/{tiling.warps}w/{tiling.stages}"


@dataclass(slots=True)
class Search:
    """Measures tilings: first all of them coarsely, until the deadline, and then the best ones."""

    shape: Shape
    operands: Operands
    compilers: Compilers
    deadline: float
    """End of the coarse round, on the monotonic clock."""
    results: Results
    times: dict[tuple[str, Tiling, int], float] = field(default_factory=dict)
    best: dict[str, Tiling] = field(default_factory=dict)

    def run(self) -> None:
        """Fill `best`; a product without measurements keeps the tiling in use."""
        todo = products(self.shape)
        candidates = {each.name: self._candidates(each) for each in todo}
        print("candidates:", {name: len(tilings) for name, tilings in candidates.items()}, flush=True)
        first = self.shape.searched_rows[0]
        self.compilers.compile(
            (product, first, tiling) for product in todo for tiling in candidates[product.name]
        )
        # Alternating between products, so that each gets the same share of the time.
        for turn in zip_longest(*([(each, tiling) for tiling in candidates[each.name]] for each in todo)):
            for product, tiling in filter(None, turn):
                if time.monotonic() < self.deadline:
                    self._measure(product, tiling, self.shape.searched_rows)
        finalists = {each.name: self._ranked(each, self.shape.searched_rows)[:FINALISTS] for each in todo}
        widest = max(self.shape.rows)
        self.compilers.compile(
            (product, widest, tiling) for product in todo for tiling in finalists[product.name]
        )
        for product in todo:
            for tiling in finalists[product.name]:
                self._measure(product, tiling, self.shape.rows)
            ranked = self._ranked(product, self.shape.rows)
            self.best[product.name] = ranked[0] if ranked else self._in_use(product)

    def _in_use(self, product: Product) -> Tiling:
        return tiling_for(product.outputs, product.keys, gated=product.gated, dtype=self.shape.dtype)

    def _candidates(self, product: Product) -> list[Tiling]:
        in_use = self._in_use(product)
        if self.shape != CHATGLM3:
            return [in_use, replace(in_use, splits=2)]
        return [in_use, *(each for each in product.tilings() if each != in_use)]

    def _measure(self, product: Product, tiling: Tiling, rows: Iterable[int]) -> None:
        for count in rows:
            key = (product.name, tiling, count)
            if key in self.times:
                continue
            label = f"{product.name} {text_of(tiling)} {count}"
            text = guarded(self.results, label, lambda: self.operands.time(product, count, tiling))  # noqa: B023
            if text != "err":
                self.times[key] = float(text)

    def _ranked(self, product: Product, rows: Iterable[int]) -> list[Tiling]:
        """Return the tilings ordered by the sum, over `rows`, of their times relative to the best."""
        rows = list(rows)
        measured = {
            tiling
            for name, tiling, _ in self.times
            if name == product.name and all((name, tiling, count) in self.times for count in rows)
        }
        least = {
            count: min((self.times[product.name, each, count] for each in measured), default=1.0)
            for count in rows
        }
        return sorted(
            measured,
            key=lambda each: sum(self.times[product.name, each, count] / least[count] for count in rows),
        )
