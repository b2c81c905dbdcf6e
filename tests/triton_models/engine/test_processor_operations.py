"""Against the plain make; attention with its cache is compared in test_attention.py."""

import pytest
import torch
from torch import Tensor

from triton_models.engine.attention import PlainOperations
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import StepLayout
from triton_models.engine.model import KVShape
from triton_models.engine.operations import Rotary
from triton_models.engine.packed_weights import pack, why_not_packed
from triton_models.engine.processor_operations import ProcessorOperations

ROWS, QUERIES, KV_HEADS, HEAD_DIM, PAIRS = 3, 4, 2, 16, 4

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def both(dtype: torch.dtype) -> tuple[PlainOperations, ProcessorOperations]:
    """Three sequences that decode at positions of their own, each make with its own cache."""
    positions = torch.tensor([0, 5, 9])
    layout = StepLayout(
        tables=torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32),
        slots=torch.arange(ROWS, dtype=torch.int32),
        positions=positions,
        decode_lengths=(positions + 1).int(),
        longest_decode=10,
    )
    shape = KVShape(layers=1, heads=KV_HEADS, head_dim=HEAD_DIM)

    def cache() -> KVCache:
        made = KVCache(shape, blocks=9, block_size=4, dtype=dtype, device=torch.device("cpu"))
        made.clear(torch.arange(1, 10))
        return made

    return PlainOperations(cache(), layout), ProcessorOperations(cache(), layout)


def assert_close(given: Tensor, expected: Tensor) -> None:
    assert given.dtype == expected.dtype
    torch.testing.assert_close(given, expected, rtol=2 * torch.finfo(given.dtype).eps, atol=1e-6)


@dtypes
def test_what_is_stored_and_attended_is_rotated_alike(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    angles = torch.rand(10, PAIRS) * 6
    rotary = Rotary(angles.cos(), angles.sin())
    projected = torch.randn(ROWS, QUERIES + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    plain, own = both(dtype)
    expected = plain.attend(0, projected.clone(), rotary)
    torch.testing.assert_close(own.attend(0, projected.clone(), rotary), expected)
    assert_close(own._cache.keys, plain._cache.keys)
    assert_close(own._cache.values, plain._cache.values)
    assert own._cache.keys[:, 1:].any()


@dtypes
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_norm(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(1)
    hidden, weight = (size * torch.randn(5, 24)).to(dtype), torch.randn(24)
    kept = hidden.clone()
    plain, own = both(dtype)
    assert_close(own.norm(hidden, weight, 1e-5), plain.norm(hidden, weight, 1e-5))
    assert torch.equal(hidden, kept)


def test_the_norm_of_nothing_is_nothing() -> None:
    _, own = both(torch.float32)
    assert not own.norm(torch.zeros(2, 24), torch.ones(24), 1e-5).any()


@dtypes
@pytest.mark.parametrize("packed", [True, False])
def test_products_with_packed_and_plain_matrices(dtype: torch.dtype, *, packed: bool) -> None:
    if packed and (obstacle := why_not_packed(dtype)):
        pytest.skip(obstacle)
    torch.manual_seed(2)
    hidden, inputs = torch.randn(5, 24).to(dtype), torch.randn(5, 40).to(dtype)
    weight, wide, bias = (torch.randn(shape).to(dtype) for shape in ((24, 40), (48, 40), (24,)))
    plain, own = both(dtype)
    laid_out, laid_out_wide = (pack(weight), pack(wide)) if packed else (weight, wide)
    # The plain make rounds what is added twice, and what is gated three times.
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for given, expected in (
        (own.linear(inputs, laid_out, bias), plain.linear(inputs, weight, bias)),
        (own.add_linear(hidden, inputs, laid_out), plain.add_linear(hidden, inputs, weight)),
        (own.linear_swiglu(inputs, laid_out_wide), plain.linear_swiglu(inputs, wide)),
    ):
        torch.testing.assert_close(given, expected, **tolerance)
