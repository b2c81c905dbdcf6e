"""A decode step without its attention: norms, products and gates of all layers in order, and the head."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.product_search import Job
from bench.gpu.products import Operands, Shape, products
from bench.gpu.timing import microseconds
from triton_models.engine.kernels.add_norm import add_norm
from triton_models.engine.kernels.swiglu import swiglu
from triton_models.engine.kernels.tilings import Tiling

AHEAD = (0, 512, 2048)
"""Keys that overlapped products ask for early."""

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Chain:
    """The step with given constants. What attention would hand on is a fixed tensor."""

    shape: Shape
    operands: Operands
    tilings: dict[str, Tiling]

    def jobs(self, ahead: int | None) -> list[Job]:
        """Return the variants that it needs; None: without overlap."""
        return [
            (product, rows, self._tiling(product.name, ahead), ahead is not None)
            for product in products(self.shape)
            for rows in {min(self.shape.rows), max(self.shape.rows)}
        ]

    def time_library(self, rows: int) -> float:
        """Return microseconds with the library's products, and our kernels between them."""
        hidden, attended, norm = self._inputs(rows)
        weights = self.operands.weights

        def step() -> None:
            delta: Tensor | None = None
            for index in range(self.shape.layers):
                normed = add_norm(hidden, delta, norm, _EPS)
                functional.linear(normed, weights["qkv"][index], self.operands.bias)
                mixed = functional.linear(attended, weights["out"][index])
                gate_up = functional.linear(add_norm(hidden, mixed, norm, _EPS), weights["gate_up"][index])
                delta = functional.linear(swiglu(gate_up), weights["down"][index])
            functional.linear(add_norm(hidden, delta, norm, _EPS), weights["head"][0])

        return microseconds([step], self.shape.device)

    def time_kernels(self, rows: int, ahead: int | None) -> float:
        """Return microseconds with our products; `ahead`: the keys asked for early, None: no overlap."""
        hidden, attended, norm = self._inputs(rows)

        def step() -> None:
            self._run(hidden, attended, norm, ahead)

        return microseconds([step], self.shape.device)

    def repeats(self, rows: int, ahead: int) -> bool:
        """Return whether overlapping changes nothing: the same bits as one after the other, ten times."""
        hidden, attended, norm = self._inputs(rows)
        expected = self._run(hidden.clone(), attended, norm, None)
        return all(torch.equal(self._run(hidden.clone(), attended, norm, ahead), expected) for _ in range(10))

    def _run(self, hidden: Tensor, attended: Tensor, norm: Tensor, ahead: int | None) -> Tensor:
        overlap = ahead is not None
        by_name = {each.name: each for each in products(self.shape)}

        def product(name: str, index: int, x: Tensor) -> Tensor:
            weight = self.operands.weights[name][index]
            tiling = self._tiling(name, ahead)
            return self.operands.run(by_name[name], x, weight, hidden, tiling, overlap=overlap)

        for index in range(self.shape.layers):
            product("qkv", index, add_norm(hidden, None, norm, _EPS, overlap=overlap))
            product("out", index, attended)
            gated = product("gate_up", index, add_norm(hidden, None, norm, _EPS, overlap=overlap))
            product("down", index, gated)
        return product("head", 0, add_norm(hidden, None, norm, _EPS, overlap=overlap))

    def _tiling(self, name: str, ahead: int | None) -> Tiling:
        return self.tilings[name] if ahead is None else replace(self.tilings[name], ahead=ahead)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden state, what attention gives, and a norm's weight."""
        norm = torch.ones(self.shape.width, device=self.shape.device)
        width = self.shape.width
        return self.operands.random(rows, width), self.operands.random(rows, width), norm
