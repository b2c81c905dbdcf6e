"""A decode step's matrix products: weights, possible tilings, and the library's products for comparison."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.timing import Launch, microseconds
from triton_models.engine.kernels.linear import Tiling, linear, new_arrivals
from triton_models.engine.kernels.rows import Rows

_SHARED = (24 * 1024, 113 * 1024)
"""Least and most bytes that one program keeps in flight: enough, but few enough for two programs to fit."""

_PROGRAMS = (132, 132 * 16)
_SPLIT_PROGRAMS = 132 * 6
_TILES = ((16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 128), (64, 256), (128, 64), (128, 128))
_MOST_COPIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's widths, and the numbers of rows to measure."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    layers: int
    width: int
    qkv: int
    ffn: int
    vocabulary: int
    rows: tuple[int, ...]
    searched_rows: tuple[int, ...]
    token_rows: tuple[int, ...]
    """Numbers of rows for the kernels around the products."""
    sampled_rows: tuple[int, ...]


CHATGLM3 = Shape(
    device=torch.device("cuda"),
    layers=28,
    width=4096,
    qkv=4608,
    ffn=13696,
    vocabulary=65024,
    rows=(1, 4, 8, 16, 32),
    searched_rows=(1, 16),
    token_rows=(1, 32, 256, 2048),
    sampled_rows=(1, 32, 256, 512),
)

TINY = Shape(
    device=torch.device("cpu"),
    dtype=torch.float32,
    layers=2,
    width=64,
    qkv=96,
    ffn=72,
    vocabulary=300,
    rows=(1, 3),
    searched_rows=(1,),
    token_rows=(1, 3),
    sampled_rows=(2,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product that occurs `count` times in a step. In the gated one, each half has `outputs` outputs."""

    name: str
    outputs: int
    keys: int
    count: int
    gated: bool = False
    biased: bool = False
    added: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight matrix."""
        return self.outputs * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Size of the weights in 16 bits, which determines the time."""
        return 2 * self.weight_rows * self.keys

    def tilings(self) -> Iterator[Tiling]:
        """Yield the tilings that are worth measuring."""
        for block_n, block_k in _TILES:
            tile = 2 * block_k * (block_n * (2 if self.gated else 1) + 16)
            stages = [each for each in (3, 4, 6) if _SHARED[0] <= (each - 1) * tile <= _SHARED[1]]
            tiles = -(-self.outputs // block_n)
            for splits in (1, 2, 4, 8):
                most = _PROGRAMS[1] if splits == 1 else _SPLIT_PROGRAMS
                if not _PROGRAMS[0] <= tiles * splits <= most:
                    continue
                for each in {stages[0], stages[-1]} if stages else ():
                    warps = 8 if block_n * block_k >= 128 * 128 else 4
                    yield Tiling(block_n=block_n, block_k=block_k, splits=splits, warps=warps, stages=each)


def products(shape: Shape) -> list[Product]:
    """Return the step's products in their order."""
    layers = shape.layers
    return [
        Product(name="qkv", outputs=shape.qkv, keys=shape.width, count=layers, biased=True),
        Product(name="out", outputs=shape.width, keys=shape.width, count=layers, added=True),
        Product(name="gate_up", outputs=shape.ffn, keys=shape.width, count=layers, gated=True),
        Product(name="down", outputs=shape.width, keys=shape.ffn, count=layers, added=True),
        Product(name="head", outputs=shape.vocabulary, keys=shape.width, count=1),
    ]


@dataclass(slots=True)
class Operands:
    """Random weights for all layers, and the products' other operands."""

    shape: Shape
    arrivals: Tensor = field(init=False)
    bias: Tensor = field(init=False)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the weights, scaled so that outputs are of the same magnitude as inputs."""
        self.arrivals = new_arrivals(self.shape.device)
        self.bias = self.random(self.shape.qkv)
        for product in products(self.shape):
            self.weights[product.name] = [
                self.random(product.weight_rows, product.keys).mul_(product.keys**-0.5)
                for _ in range(product.count)
            ]

    def random(self, *size: int) -> Tensor:
        """Return normally distributed numbers."""
        return torch.empty(size, dtype=self.shape.dtype, device=self.shape.device).normal_()

    def run(self, product: Product, x: Tensor, weight: Tensor, residual: Tensor, tiling: Tiling) -> Tensor:
        """Launch one product with the operations fused into it; an `added` product adds to `residual`."""
        if product.gated:
            return linear(Rows(x), weight, arrivals=self.arrivals, gated=True, tiling=tiling)
        return linear(
            Rows(x),
            weight,
            self.bias if product.biased else None,
            arrivals=self.arrivals,
            residual=residual if product.added else None,
            tiling=tiling,
        )

    def time(self, product: Product, rows: int, tiling: Tiling) -> float:
        """Return the microseconds of one product, measured over several copies of the weights."""
        x, residual = self.random(rows, product.keys), self.random(rows, product.outputs)

        def launch(weight: Tensor) -> Launch:
            def run() -> None:
                self.run(product, x, weight, residual, tiling)

            return run

        return microseconds(self._each_copy(product, launch), self.shape.device)

    def time_library(self, product: Product, rows: int) -> float:
        """Return the microseconds of the library's product, without fused operations except the bias."""
        x = self.random(rows, product.keys)
        bias = self.bias if product.biased else None

        def launch(weight: Tensor) -> Launch:
            def run() -> None:
                functional.linear(x, weight, bias)

            return run

        return microseconds(self._each_copy(product, launch), self.shape.device)

    def _each_copy(self, product: Product, launch: Callable[[Tensor], Launch]) -> list[Launch]:
        return [launch(weight) for weight in self.weights[product.name][:_MOST_COPIES]]

    def error(self, product: Product, rows: int, tiling: Tiling) -> float:
        """Return the relative error against float64.

        Raises:
            ValueError: a row depends on the others, or on the order in which programs arrive.
        """
        x, before = self.random(rows, product.keys), self.random(rows, product.outputs)
        weight = self.weights[product.name][-1]

        def result(part: slice) -> Tensor:
            return self.run(product, x[part].clone(), weight, before[part].clone(), tiling)

        complete = result(slice(None))
        for _ in range(10):
            if not torch.equal(result(slice(None)), complete):
                raise ValueError("a repetition differs")
        if not torch.equal(result(slice(rows - 1, rows)), complete[-1:]):
            raise ValueError("a row depends on the others")
        exact = x.double() @ weight.double().T
        if product.gated:
            gate, up = exact.chunk(2, dim=-1)
            exact = functional.silu(gate) * up
        exact += self.bias.double() if product.biased else 0
        exact += before.double() if product.added else 0
        return float((complete.double() - exact).norm() / exact.norm())


def compile_product(shape: Shape, product: Product, rows: int, tiling: Tiling) -> None:
    """Launch a product once, to fill the compiler's cache."""
    operands = Operands(replace(shape, layers=0, vocabulary=8))
    x = operands.random(rows, product.keys)
    weight = torch.empty((product.weight_rows, product.keys), dtype=shape.dtype, device=shape.device)
    operands.run(product, x, weight, operands.random(rows, product.outputs), tiling)
