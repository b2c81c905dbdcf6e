import random
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, silu

from tests.triton_models.engine import paged
from tests.triton_models.engine.paged import Heads, PagedSequence, attend_in_turns
from tests.triton_models.engine.rotated import rotate_in_place
from triton_models.engine.blocks import KVCache
from triton_models.engine.linear import Linear, pack, why_not_packed
from triton_models.engine.models import KVShape, Norm, Rotary, StepLayout
from triton_models.engine.ops_torch import PlainMath, TorchOperations

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4
SHAPE = Heads(HEADS, KV_HEADS, HEAD_DIM)


def attend(
    cache: KVCache,
    layer: int,
    decodes: list[tuple[PagedSequence, int]],
    chunks: list[tuple[PagedSequence, int, int]],
) -> None:
    paged.attend(TorchOperations(None, cache, 0), BLOCK_SIZE, layer, decodes, chunks)


@pytest.fixture
def cache() -> KVCache:
    torch.manual_seed(3)
    cache = SHAPE.cache(30, BLOCK_SIZE)
    cache.clear(torch.arange(1, 31))
    return cache


def test_any_mixture_of_decodes_and_chunks_equals_whole_sequences(cache: KVCache) -> None:
    numbers = random.Random(1)
    blocks = list(range(1, 31))
    numbers.shuffle(blocks)
    sequences = [PagedSequence(length, [blocks.pop() for _ in range(8)], SHAPE) for length in (32, 17, 5)]
    attend_in_turns(partial(attend, cache, 1), sequences, numbers)
    assert not cache.keys[0].any()


def test_a_prompt_in_one_chunk(cache: KVCache) -> None:
    attend(cache, 0, [], [(PagedSequence(13, [4, 2, 9, 7], SHAPE), 0, 13)])


def test_cleared_blocks_hold_no_nan_of_their_last_holder(cache: KVCache) -> None:
    cache.keys[:, 3] = torch.nan
    cache.values[:, 3] = torch.nan
    cache.clear(torch.tensor([3]))
    attend(cache, 0, [(PagedSequence(1, [3], SHAPE), 0)], [(PagedSequence(2, [5], SHAPE), 0, 2)])


def test_reset_makes_padding_clean_again(cache: KVCache) -> None:
    cache.keys[:, 0] = torch.nan
    cache.values[:, 0] = torch.nan
    cache.reset()
    long, short = PagedSequence(9, [1, 2, 3], SHAPE), PagedSequence(1, [4], SHAPE)
    attend(cache, 0, [], [(long, 0, 8)])
    attend(cache, 0, [(long, 8), (short, 0)], [])


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def assert_close(given: Tensor, expected: Tensor) -> None:
    assert given.dtype == expected.dtype
    torch.testing.assert_close(given, expected, rtol=2 * torch.finfo(given.dtype).eps, atol=1e-6)


@dtypes
def test_queries_and_stored_keys_are_rotated_by_their_positions(dtype: torch.dtype) -> None:
    """Three sequences that decode at positions of their own, against the rotation's definition."""
    torch.manual_seed(0)
    pairs, slots = 2, torch.arange(3, dtype=torch.int32)
    angles = torch.rand(10, pairs) * 6
    rotary, positions = Rotary(angles.cos(), angles.sin()), torch.tensor([0, 5, 9])
    layout = StepLayout(
        tables=torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32),
        slots=slots,
        positions=positions,
        decode_lengths=(positions + 1).int(),
        longest_decode=10,
    )
    shape = KVShape(layers=1, heads=KV_HEADS, head_dim=HEAD_DIM)
    projected = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    rotated = projected.clone()
    rotate_in_place(rotated[:, :-KV_HEADS], rotary.cos[positions, None], rotary.sin[positions, None])
    results = []
    for heads, turned in ((projected, rotary), (rotated, None)):
        cache = KVCache(shape, blocks=9, block_size=BLOCK_SIZE, dtype=dtype, device=torch.device("cpu"))
        cache.clear(torch.arange(1, 10))
        operations = TorchOperations(None, cache, 0)
        operations.begin(layout)
        results.append((operations.attend(0, heads.clone(), turned), cache))
    (attended, cache), *others = results
    for expected, expected_cache in others:
        torch.testing.assert_close(attended, expected)
        assert_close(cache.keys, expected_cache.keys)
        assert_close(cache.values, expected_cache.values)
    assert cache.keys[:, 1:].any()


@dtypes
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_norm(dtype: torch.dtype, size: float, cache: KVCache) -> None:
    torch.manual_seed(1)
    hidden, weight = (size * torch.randn(5, 24)).to(dtype), torch.randn(24)
    kept = hidden.clone()
    given = TorchOperations(None, cache, 0).norm(hidden, Norm(weight, None, 1e-5))
    assert_close(given, rms_norm(hidden.float(), weight.shape, weight, 1e-5).to(dtype))
    assert torch.equal(hidden, kept)


@dtypes
def test_layer_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(5, 24).to(dtype), torch.randn(24), torch.randn(24)
    kept = hidden.clone()
    given = PlainMath().norm(hidden, Norm(weight, bias, 1e-5))
    assert_close(given, layer_norm(hidden.float(), weight.shape, weight, bias, 1e-5).to(dtype))
    assert torch.equal(hidden, kept)


def test_the_norm_of_nothing_is_nothing(cache: KVCache) -> None:
    norm = Norm(torch.ones(24), None, 1e-5)
    assert not TorchOperations(None, cache, 0).norm(torch.zeros(2, 24), norm).any()


@dtypes
@pytest.mark.parametrize("packed", [True, False])
def test_products_with_packed_and_plain_matrices(dtype: torch.dtype, *, packed: bool) -> None:
    if packed and (obstacle := why_not_packed(dtype)):
        pytest.skip(obstacle)
    torch.manual_seed(2)
    hidden, inputs = torch.randn(5, 24).to(dtype), torch.randn(5, 40).to(dtype)
    weight, wide, bias = (torch.randn(shape).to(dtype) for shape in ((24, 40), (48, 40), (24,)))
    operations = PlainMath()

    def made(weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack(Linear(weight, bias)) if packed else Linear(weight, bias)

    gate, up = linear(inputs, wide).chunk(2, dim=-1)
    # Plain torch rounds what is added twice, and what is gated three times.
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for given, expected in (
        (operations.linear(inputs, made(weight, bias)), linear(inputs, weight, bias)),
        (operations.add_linear(hidden, inputs, made(weight)), hidden + linear(inputs, weight)),
        (operations.add_linear(hidden, inputs, made(weight, bias)), hidden + linear(inputs, weight, bias)),
        (operations.linear_swiglu(inputs, made(wide)), silu(gate) * up),
        (
            operations.linear_gelu(inputs, made(weight, bias)),
            gelu(linear(inputs, weight, bias), approximate="tanh"),
        ),
    ):
        torch.testing.assert_close(given, expected, **tolerance)


@dtypes
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_normed_inputs(dtype: torch.dtype, *, biased: bool) -> None:
    torch.manual_seed(2)
    inputs, matrix = torch.randn(5, 40).to(dtype), Linear(torch.randn(48, 40).to(dtype))
    norm = Norm(torch.randn(40), torch.randn(40) if biased else None, 1e-5)
    kept, operations = inputs.clone(), PlainMath()
    for product in (operations.linear, operations.linear_swiglu, operations.linear_gelu):
        assert torch.equal(product(inputs, matrix, norm=norm), product(operations.norm(inputs, norm), matrix))
    assert torch.equal(inputs, kept)
