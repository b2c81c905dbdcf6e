import pytest
import torch
from torch import Tensor

from triton_models.engine.kernels.add_norm import add_norm
from triton_models.engine.kernels.linear import linear, linear_swiglu, new_arrivals
from triton_models.engine.kernels.swiglu import swiglu

LAYERS = 6
WIDTH = 1024

needs_dependent_launch = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0: the interpreter runs one kernel after the other",
)


def weights(device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / WIDTH**0.5).to(device, torch.bfloat16)

    return [(random(WIDTH, WIDTH), random(4 * WIDTH, WIDTH), random(WIDTH, 2 * WIDTH)) for _ in range(LAYERS)]


def forward(
    hidden: Tensor, layers: list[tuple[Tensor, Tensor, Tensor]], arrivals: Tensor, *, overlap: bool
) -> Tensor:
    """Run every kernel that can overlap, each needing what the one in front has written."""
    hidden = hidden.clone()
    norm = torch.ones(WIDTH, device=hidden.device)
    delta = None
    for mix, gate_up, down in layers:
        normed = add_norm(hidden, delta, norm, 1e-5, overlap=overlap)
        linear(normed, mix, arrivals=arrivals, residual=hidden, overlap=overlap)
        normed = add_norm(hidden, None, norm, 1e-5, overlap=overlap)
        gated = linear_swiglu(normed, gate_up, arrivals=arrivals, overlap=overlap)
        unfused = swiglu(linear(normed, gate_up, arrivals=arrivals, overlap=overlap), overlap=overlap)
        delta = linear(gated + unfused, down, arrivals=arrivals, overlap=overlap)
    return hidden


@needs_dependent_launch
@pytest.mark.parametrize("rows", [1, 16])
def test_overlapped_kernels_give_the_same_bits(rows: int, device: torch.device) -> None:
    layers, arrivals = weights(device), new_arrivals(device)
    hidden = torch.randn((rows, WIDTH), generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    expected = forward(hidden, layers, arrivals, overlap=False)
    assert torch.equal(forward(hidden, layers, arrivals, overlap=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(hidden, layers, arrivals, overlap=True)
    for _ in range(50):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
