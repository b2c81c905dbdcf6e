"""Launches that steps of few rows do without: what makes the rows does their work."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.kernels.test_linear import error, random
from triton_models.engine import ops_cuda
from triton_models.engine.blocks import KVCache
from triton_models.engine.kernels import tiles as kernels_of_tiles
from triton_models.engine.kernels.linear import Tiling
from triton_models.engine.kernels.rows import prepare
from triton_models.engine.kernels.tiles import tiled
from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, KVShape, Next, Norm, Rotary, StepLayout
from triton_models.engine.ops_cuda import CudaOperations
from triton_models.engine.quantised import FP8_CAPABILITY, Fp8Linear, Int4Linear, Int8Linear


@pytest.fixture(autouse=True)
def few_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted, only two programs share the columns, of which 128 are one's here.

    So one has nothing to do, as seven have of the eight that a GPU gets.
    """
    if device.type != "cuda":
        monkeypatch.setattr(kernels_of_tiles, "splits_for", lambda _tiles: 2)


@pytest.mark.parametrize("knows", [Rotary, Alibi, None])
def test_decodes_without_prompts_take_no_launch_to_rotate_and_store(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, knows: type[Rotary | Alibi] | None
) -> None:
    """They come to what they do beside prompts, of which padding leaves none here."""
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=4, dtype=torch.float32, device=device)
    cache = KVCache(shape, blocks=4, block_size=16, dtype=torch.float32, device=device)
    operations = CudaOperations(model, cache, rows=2)
    past = random(2, *cache.keys.shape, dtype=torch.float32, device=device)
    projected = random(2, 8, 16, dtype=torch.float32, device=device, seed=1)
    angles = random(40, 4, dtype=torch.float32, device=device, seed=2)
    rotary = {Rotary: Rotary(angles.cos(), angles.sin()), Alibi: Alibi(angles[0].abs()), None: None}[knows]
    lengths = torch.tensor([33, 16], dtype=torch.int32, device=device)
    layout = StepLayout(
        tables=torch.tensor([[2, 4, 1], [3, 0, 0]], dtype=torch.int32, device=device),
        slots=torch.tensor([0, 1], dtype=torch.int32, device=device),
        positions=lengths.long() - 1,
        decode_lengths=lengths,
        longest_decode=33,
    )
    no_prompts = torch.zeros((1, 4), dtype=torch.int32, device=device)
    results = []
    for tiles in (no_prompts, None):
        if tiles is None:
            monkeypatch.setattr(ops_cuda, "rotate_store", None)
        cache.keys.copy_(past[0])
        cache.values.copy_(past[1])
        operations.begin(replace(layout, tiles=tiles))
        attended = operations.attend(0, projected.clone(), rotary)
        results.append((attended, cache.keys.clone(), cache.values.clone()))
    assert [torch.equal(*pair) for pair in zip(*results, strict=True)] == [True] * 3
    changed = (results[0][2] != past[1]).nonzero()[:, 1:3].unique(dim=0)
    assert changed.tolist() == [[1, 0], [3, 15]]


def made(
    form: type[Linear],
    outputs: int,
    keys: int,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Linear:
    matrix = form.empty(outputs, keys, bias=False, dtype=dtype, device=device)
    matrix.place.copy_(random(outputs, keys, dtype=torch.float32, device=device, seed=seed) / 8)
    return tiled(matrix)


def decodes(lengths: Tensor) -> StepLayout:
    """The layout of a step of decodes alone, each in a block of its own."""
    slots = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return StepLayout(
        tables=slots[:, None] + 1,
        slots=slots,
        positions=lengths.long() - 1,
        decode_lengths=lengths,
        longest_decode=int(lengths.max()),
    )


@pytest.mark.parametrize("form", [Linear, Int8Linear, Int4Linear, Fp8Linear])
@pytest.mark.parametrize(("head_dim", "rows"), [(128, 2), (128, 33), (32, 2), (192, 2), (384, 2)])
def test_attention_writes_what_the_next_product_takes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, form: type[Linear], head_dim: int, rows: int
) -> None:
    """Of few rows, and of heads that are whole blocks and fill their tiles; otherwise, a launch does it."""
    if form is Fp8Linear and device.type == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with products of 8-bit numbers")
    shape = KVShape(layers=1, heads=1, head_dim=head_dim)
    model = SimpleNamespace(kv_shape=shape, query_heads=2, dtype=torch.bfloat16, device=device)
    cache = KVCache(shape, blocks=rows, block_size=16, dtype=torch.bfloat16, device=device)
    operations = CudaOperations(model, cache, rows=rows)
    cache.keys.copy_(random(*cache.keys.shape, dtype=torch.bfloat16, device=device, seed=1))
    cache.values.copy_(random(*cache.values.shape, dtype=torch.bfloat16, device=device, seed=2))
    layout = decodes(torch.full((rows,), 9, dtype=torch.int32, device=device))
    matrix = made(form, 64, 2 * head_dim, device, seed=3)
    projected = random(rows, 4, head_dim, dtype=torch.bfloat16, device=device, seed=4)
    hidden = random(rows, 64, dtype=torch.bfloat16, device=device, seed=5)

    def attended(then: Next | None) -> Tensor:
        operations.begin(layout)
        result = operations.attend(0, projected.clone(), None, then=then)
        return operations.add_linear(hidden.clone(), result, matrix)

    expected = attended(None)
    launches = {name: Mock(wraps=getattr(ops_cuda, name)) for name in ("prepare", "quantise_rows")}
    for name, launch in launches.items():
        monkeypatch.setattr(ops_cuda, name, launch)
    assert error(attended(Next(matrix)), expected.double()) < (2e-2 if form is Fp8Linear else 4e-3)
    written = rows == 2 and head_dim == 128
    assert launches["quantise_rows"].call_count == (form is Fp8Linear and not written)
    if form is Int4Linear:
        assert launches["prepare"].call_count == (not written)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_attention_scales_what_the_library_multiplied(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, *, bias: bool, rotates: bool
) -> None:
    """Without prompts; beside them, in a launch after the product. To the same bits in either case."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with products of 8-bit numbers")
    rows, heads, head_dim, width = 33, 2, 16, 64
    shape = KVShape(layers=1, heads=1, head_dim=head_dim)
    model = SimpleNamespace(kv_shape=shape, query_heads=heads, dtype=torch.bfloat16, device=device)
    cache = KVCache(shape, blocks=rows, block_size=16, dtype=torch.bfloat16, device=device)
    operations = CudaOperations(model, cache, rows=rows)
    past = random(2, *cache.keys.shape, dtype=torch.bfloat16, device=device)
    layout = decodes(torch.arange(rows, dtype=torch.int32, device=device) % 16 + 1)
    matrix = Fp8Linear.empty((heads + 2) * head_dim, width, bias=bias, dtype=torch.bfloat16, device=device)
    matrix.place.copy_(random(len(matrix.weight), width, dtype=torch.float32, device=device, seed=1) / 8)
    if matrix.bias is not None:
        matrix.bias.copy_(random(len(matrix.bias), dtype=torch.float32, device=device, seed=2))
    angles = random(16, 4, dtype=torch.float32, device=device, seed=3)
    rotary = Rotary(angles.cos(), angles.sin()) if rotates else None
    inputs = random(rows, width, dtype=torch.bfloat16, device=device, seed=4)
    results = []
    for attends in (False, True):
        cache.keys.copy_(past[0])
        cache.values.copy_(past[1])
        operations.begin(layout)
        if attends:
            monkeypatch.setattr(ops_cuda, "scaled_product", None)
        projected = operations.linear(inputs, matrix, attends=attends).view(rows, -1, head_dim)
        attended = operations.attend(0, projected, rotary)
        results.append((attended, cache.keys.clone(), cache.values.clone()))
    assert [torch.equal(*pair) for pair in zip(*results, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (Linear, torch.bfloat16),
        (Linear, torch.float16),
        (Linear, torch.float32),
        (Int8Linear, torch.bfloat16),
        (Int4Linear, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_products_of_few_rows_begin_the_next_norm(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    form: type[Linear],
    dtype: torch.dtype,
    *,
    gated: bool,
    layer_norm: bool,
) -> None:
    """In bfloat16, if it is an RMSNorm; and if then another is asked for, or of others, that is computed."""
    large = Tiling(block_n=64, block_k=64, splits=1, warps=4, stages=2)
    small = replace(large, block_n=32)
    # Only of what adds to hidden states are tiles whole blocks.
    monkeypatch.setattr(ops_cuda, "tiling_for", lambda *_, adds, **__: large if adds else small)
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=4, dtype=dtype, device=device)
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    begun, inputs = (random(3, 128, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    matrix, up, down = (
        made(form, size, 128, device, seed, dtype)
        for seed, size in enumerate((128, 256 if gated else 128, 128), start=3)
    )
    shift = torch.ones(128, device=device) if layer_norm else None
    first, second = (
        Norm(random(128, dtype=torch.float32, device=device, seed=seed), shift, 1e-5) for seed in (6, 7)
    )

    def layer(*told: Next | None) -> tuple[Tensor, Tensor]:
        hidden = operations.add_linear(begun.clone(), inputs, matrix, then=told[0])
        hidden = operations.feed_forward(hidden, up, down, norm=first, gated=gated, add=True, then=told[1])
        return hidden, operations.linear(hidden, matrix, norm=second)

    norms = Mock(wraps=prepare)
    monkeypatch.setattr(ops_cuda, "prepare", norms)

    def launches() -> int:
        made_ready = [call for call in norms.call_args_list if call.args[1] is not None]
        norms.reset_mock()
        return len(made_ready)

    expected = layer(None, None)
    assert launches() == 2
    right = Next(up, first), Next(matrix, second)
    begin = dtype == torch.bfloat16 and not layer_norm
    for told, spared in ((right, 2), ((right[0], None), 1), ((right[1], right[1]), 1), ((None, right[0]), 0)):
        for result, wanted in zip(layer(*told), expected, strict=True):
            assert error(result, wanted.double()) < 1e-2
        assert launches() == 2 - begin * spared
    operations.add_linear(begun.clone(), inputs, matrix, then=right[1])
    others = operations.linear(begun, matrix, norm=second)
    assert torch.equal(others, operations.linear(begun, matrix, norm=second))


def test_hidden_states_of_float16_may_be_large(device: torch.device) -> None:
    """Their norm is not, but what it is before it is divided."""
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=4, dtype=torch.float16, device=device)
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    matrix = made(Linear, 64, 64, device, 1, torch.float16)
    norm = Norm(torch.full((64,), 2.0, device=device), None, 1e-5)
    hidden = torch.full((1, 64), 4e4, dtype=torch.float16, device=device)
    inputs = torch.zeros(1, 64, dtype=torch.float16, device=device)
    hidden = operations.add_linear(hidden, inputs, matrix, then=Next(matrix, norm))
    assert operations.linear(hidden, matrix, norm=norm).isfinite().all()


def test_a_matrix_in_another_form_gets_rows_of_its_own(device: torch.device) -> None:
    """With sums or without, whatever was told."""
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=4, dtype=torch.bfloat16, device=device)
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    plain, packed = (made(form, 128, 128, device, 1) for form in (Linear, Int4Linear))
    norm = Norm(torch.ones(128, device=device), None, 1e-5)
    begun, inputs = (random(2, 128, dtype=torch.bfloat16, device=device, seed=seed) for seed in (2, 3))
    for told, asked in ((plain, packed), (packed, plain)):
        hidden = operations.add_linear(begun.clone(), inputs, packed, then=Next(told, norm))
        product = operations.linear(hidden, asked, norm=norm)
        assert torch.equal(product, operations.linear(hidden, asked, norm=norm))


def test_tiles_that_are_no_whole_blocks_leave_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a launch sums up what the next product takes."""
    small = Tiling(block_n=32, block_k=64, splits=1, warps=4, stages=2)
    monkeypatch.setattr(ops_cuda, "tiling_for", lambda *_, **__: small)
    shape = KVShape(layers=1, heads=2, head_dim=16)
    model = SimpleNamespace(kv_shape=shape, query_heads=4, dtype=torch.bfloat16, device=device)
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    up, down = made(Linear, 256, 128, device, 1), made(Int4Linear, 128, 128, device, 2)
    hidden = random(2, 128, dtype=torch.bfloat16, device=device, seed=3)
    norm = Norm(torch.ones(128, device=device), None, 1e-5)
    result = operations.feed_forward(hidden, up, down, norm=norm, gated=True, add=False)
    activated = operations.linear_swiglu(hidden, up, norm=norm)
    assert torch.equal(result, operations.linear(activated, down))
