"""Times a decode step without attention: norms, products and gates of all layers in order, and the head.

The engine's own steps of few rows launch no norms: a product leaves rows for the next one (`kernels.rows`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.product_search import Job
from bench.gpu.products import Operands, Shape, products
from bench.gpu.timing import microseconds
from triton_models.engine.kernels.elementwise import norm, swiglu
from triton_models.engine.kernels.linear import Tiling

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Chain:
    """A step with given tilings. A fixed tensor takes the place of attention's output."""

    shape: Shape
    operands: Operands
    tilings: dict[str, Tiling]

    def jobs(self) -> list[Job]:
        """Return the kernel variants to compile."""
        return [
            (product, rows, self.tilings[product.name])
            for product in products(self.shape)
            for rows in {min(self.shape.rows), max(self.shape.rows)}
        ]

    def time_library(self, rows: int) -> float:
        """Return the microseconds of a step with the library's products, which steps with more rows use."""
        hidden, attended, weight = self._inputs(rows)
        weights = self.operands.weights

        def step() -> None:
            for index in range(self.shape.layers):
                functional.linear(norm(hidden, weight, _EPS), weights["qkv"][index], self.operands.bias)
                torch.addmm(hidden, attended, weights["out"][index].T, out=hidden)
                gate_up = functional.linear(norm(hidden, weight, _EPS), weights["gate_up"][index])
                torch.addmm(hidden, swiglu(gate_up), weights["down"][index].T, out=hidden)
            functional.linear(norm(hidden, weight, _EPS), weights["head"][0])

        return microseconds([step], self.shape.device)

    def time_kernels(self, rows: int) -> float:
        """Return the microseconds of a step with our products and the operations fused into them."""
        hidden, attended, weight = self._inputs(rows)
        by_name = {each.name: each for each in products(self.shape)}

        def product(name: str, index: int, x: Tensor) -> Tensor:
            matrix = self.operands.weights[name][index]
            return self.operands.run(by_name[name], x, matrix, hidden, self.tilings[name])

        def step() -> None:
            for index in range(self.shape.layers):
                product("qkv", index, norm(hidden, weight, _EPS))
                product("out", index, attended)
                product("down", index, product("gate_up", index, norm(hidden, weight, _EPS)))
            product("head", 0, norm(hidden, weight, _EPS))

        return microseconds([step], self.shape.device)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a hidden state, a substitute for attention's output, and a norm's weight."""
        width = self.shape.width
        weight = torch.ones(width, device=self.shape.device)
        return self.operands.random(rows, width), self.operands.random(rows, width), weight
