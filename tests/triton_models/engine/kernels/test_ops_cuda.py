"""The engine on its kernels: the same answers as in plain torch, and as the original code's."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.kernels.test_linear import error, random
from tests.triton_models.engine.uncaptured import do_again
from tests.triton_models.native_checkpoint import write_bloom, write_native
from triton_models.checkpoint import load_model
from triton_models.engine import engine, graphs, ops_cuda
from triton_models.engine.backend import PLAIN, Backend, cuda_backend
from triton_models.engine.beams import BeamParams, BeamRequest, BeamSearches
from triton_models.engine.blocks import KVCache
from triton_models.engine.capacity import Capacity, choose_capacity
from triton_models.engine.engine import Engine
from triton_models.engine.kernels.attention_decode import DecodePlan, share_out
from triton_models.engine.kernels.fp8 import quantise_rows
from triton_models.engine.kernels.linear import Tiling
from triton_models.engine.kernels.tiles import TiledLinear, tiled
from triton_models.engine.linear import Linear
from triton_models.engine.models import CausalModel, KVShape, Next, Norm
from triton_models.engine.ops_cuda import CudaOperations
from triton_models.engine.quantised import FP8_CAPABILITY, Fp8Linear, Int4Linear, Int8Linear, QuantisedLinear
from triton_models.engine.runner import Runner
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings
from triton_models.transformers_checkpoint import load_transformers

GOLDEN = Path(__file__).parents[3] / "golden"
SMALL = EngineSettings(max_running=4, max_batched_tokens=40, kv_blocks=24)
SHAPE = {
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 128,
}
"""Of a checkpoint whose products the compiler's interpreter computes in seconds; one group of int4 each."""


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Where there is no device to capture graphs, their work is done again instead of replayed.

    And products have large tiles there, and steps no more empty ones than there may be sequences: the time
    of the compiler's interpreter goes with their number.
    """
    if device.type != "cuda":
        do_again(monkeypatch)
        monkeypatch.setattr(graphs, "_CHUNKS", SMALL.max_running)
        large = Tiling(block_n=128, block_k=64, splits=2, warps=4, stages=3)
        monkeypatch.setattr(ops_cuda, "tiling_for", lambda *_shape, **_options: large)
    return cuda_backend(torch.float32)


def test_greedy_answers_are_the_original_codes(kernels: Backend, device: torch.device) -> None:
    cases = json.loads((GOLDEN / "chatglm3" / "golden.json").read_text(encoding="utf-8"))["cases"]
    case = min(cases, key=lambda case: len(case["input_ids"]))
    made = Engine(load_model(GOLDEN / "chatglm3", torch.float32, device), SMALL, backend=kernels)
    made.add(request("a", case["input_ids"], SamplingParams(temperature=0.0, max_tokens=2)))
    assert ids(run(made)["a"]) == case["greedy_ids"][:2]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4", {}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
    ],
)
def test_other_families_answer_as_in_plain_torch(
    kernels: Backend, device: torch.device, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """With what ChatGLM has not: norms of outputs and of heads, biases, a tied head."""
    write_native(tmp_path, family, **SHAPE, **changes)
    model = load_model(tmp_path, torch.float32, device)
    answers = []
    for backend in (PLAIN, kernels):
        made = Engine(model, SMALL, backend=backend)
        for key, prompt in (("a", (5, 6, 7)), ("b", range(20))):
            made.add(request(key, prompt, SamplingParams(temperature=0.0, max_tokens=2)))
        answers.append({key: ids(outputs) for key, outputs in run(made).items()})
    assert answers[0] == answers[1]


def test_divided_sequences_answer_as_in_plain_torch(
    kernels: Backend, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One workspace serves all layers and steps, and what divides the sequences all layers of a step."""
    plan = DecodePlan(tile=16, warps=4, stages=2, extra=3)
    monkeypatch.setattr(ops_cuda, "plan_decode", lambda *_, **__: plan)
    divided = torch.zeros((), dtype=torch.int32, device=device)

    def shared(*arguments: Any) -> Tensor:
        items = share_out(*arguments)
        divided.add_(((items[:, 0] >= 0) & (items[:, 3] > 0)).any())  # captured, too: nothing is read here
        return items

    monkeypatch.setattr(ops_cuda, "share_out", shared)
    write_native(tmp_path, "qwen2", **SHAPE)
    model = load_model(tmp_path, torch.float32, device)
    answers = []
    for backend in (PLAIN, kernels):
        made = Engine(model, SMALL, backend=backend)
        for key, prompt in (("long", range(75)), ("short", (5, 6, 7))):
            made.add(request(key, prompt, SamplingParams(temperature=0.0, max_tokens=4)))
        answers.append({key: ids(outputs) for key, outputs in run(made).items()})
    assert answers[0] == answers[1]
    assert divided > 1


def test_a_model_of_transformers_answers_as_in_plain_torch(
    kernels: Backend, device: torch.device, tmp_path: Path
) -> None:
    """Rotated already, in heads that are stored wider than they are, and without graphs."""
    write_native(tmp_path, "gpt_neox", **(SHAPE | {"hidden_size": 96, "num_attention_heads": 4}))
    answers = []
    for backend in (PLAIN, replace(kernels, graphs=False)):
        model = load_transformers(tmp_path, torch.float32, device)
        assert model.kv_shape.head_dim == 32
        made = Engine(model, SMALL, backend=backend)
        for key, prompt in (("a", (5, 6, 7)), ("b", range(20))):
            made.add(request(key, prompt, SamplingParams(temperature=0.0, max_tokens=3)))
        answers.append({key: ids(outputs) for key, outputs in run(made).items()})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("rows", [32, 2])
def test_bloom_answers_as_in_plain_torch(
    kernels: Backend, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """By our products, and with more rows than they take; heads of no power of two, in width and number."""
    write_bloom(tmp_path, vocab_size=128, hidden_size=120, n_head=6, n_layer=1)
    model = load_model(tmp_path, torch.float32, device)
    monkeypatch.setattr(ops_cuda, "MAX_ROWS", rows)
    answers = []
    for backend in (PLAIN, kernels):
        made = Engine(model, SMALL, backend=backend)
        for key, prompt in (("a", (5, 6, 7)), ("b", range(20))):
            made.add(request(key, prompt, SamplingParams(temperature=0.0, max_tokens=2)))
        answers.append({key: ids(outputs) for key, outputs in run(made).items()})
    assert answers[0] == answers[1]


def test_beams_are_the_plain_ones(kernels: Backend, device: torch.device, tmp_path: Path) -> None:
    """Blocks are copied on the device before a step, which a graph may compute."""
    write_bloom(tmp_path, vocab_size=128, hidden_size=120, n_head=6, n_layer=1)
    model = load_model(tmp_path, torch.float32, device)
    answers = []
    for backend in (PLAIN, kernels):
        searches = BeamSearches(Engine(model, SMALL, backend=backend))
        sampling = SamplingParams(max_tokens=3)
        searches.add(
            BeamRequest(
                request=request("s", range(21), sampling),
                params=BeamParams(width=3),
                answers=("s.0", "s.1", "s.2"),
            )
        )
        outputs: list[Any] = []
        while len(outputs) < 9:
            searches._engine.step()
            outputs += searches.take_outputs()
        answers.append([(each.request_id, each.token_id) for each in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("form", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("gates", [128, 96])
@pytest.mark.parametrize("most", [256, 2])
def test_quantised_products_are_the_plain_ones(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, form: type[QuantisedLinear], gates: int, most: int
) -> None:
    """By our kernel, whether or not gates fill its tiles, and with more rows than it takes."""
    monkeypatch.setattr(ops_cuda, "TILED_ROWS", most)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=16), query_heads=4, dtype=torch.float16, device=device
    )
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    inputs = random(3, 200, dtype=torch.float16, device=device)
    plain = form.empty(2 * gates, 200, bias=True, dtype=torch.float16, device=device)
    plain.place.copy_(random(2 * gates, 200, dtype=torch.float32, device=device, seed=1) / 8)
    assert plain.bias is not None
    plain.bias.zero_()
    matrix = tiled(plain)
    assert isinstance(matrix, TiledLinear)
    exact = inputs.double() @ plain.exact(0, 2 * gates).double().T
    assert error(operations.linear(inputs, matrix), exact) < 2e-3
    hidden = random(3, 2 * gates, dtype=torch.float16, device=device, seed=2)
    assert error(operations.add_linear(hidden.clone(), inputs, matrix), exact + hidden) < 2e-3
    gate, up = exact.chunk(2, dim=-1)
    assert error(operations.linear_swiglu(inputs, matrix), silu(gate) * up) < 5e-3


@pytest.mark.parametrize("form", [Linear, Int8Linear, Fp8Linear])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("most", [64, 2])
def test_products_of_normed_inputs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, form: type[Linear], most: int, *, biased: bool
) -> None:
    """By our kernels, and with more rows than they take; one launch norms rows and rounds them to 8 bits."""
    if form is Fp8Linear and device.type == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with products of 8-bit numbers")
    for name in ("MAX_ROWS", "TILED_ROWS", "FP8_ROWS"):
        monkeypatch.setattr(ops_cuda, name, most)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=16), query_heads=4, dtype=torch.bfloat16, device=device
    )
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    inputs = random(3, 256, dtype=torch.bfloat16, device=device)
    plain = form.empty(256, 256, bias=False, dtype=torch.bfloat16, device=device)
    plain.place.copy_(random(256, 256, dtype=torch.float32, device=device, seed=1) / 8)
    matrix = tiled(plain)
    weight = random(256, dtype=torch.float32, device=device, seed=2)
    bias = random(256, dtype=torch.float32, device=device, seed=3) if biased else None
    norm, kept = Norm(weight, bias, 1e-5), inputs.clone()
    products: tuple[Callable[..., Tensor], ...] = (
        operations.linear, operations.linear_swiglu, operations.linear_gelu,
    )  # fmt: skip
    normed = operations.norm(inputs, norm)
    expected = [product(normed, matrix) for product in products]
    launches = Mock(wraps=quantise_rows)
    monkeypatch.setattr(ops_cuda, "quantise_rows", launches)
    if form is Fp8Linear:
        monkeypatch.setattr(ops_cuda, "norm_rows", None)
    for product, result in zip(products, expected, strict=True):
        assert torch.equal(product(inputs, matrix, norm=norm), result)
    assert torch.equal(inputs, kept)
    assert launches.call_count == (len(products) if form is Fp8Linear else 0)


@pytest.mark.parametrize("form", [Linear, Fp8Linear])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("most", [64, 2])
@pytest.mark.parametrize("outputs", [256, 272, 280])
def test_a_feed_forward_part_is_its_products(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    form: type[Linear],
    outputs: int,
    most: int,
    *,
    gated: bool,
) -> None:
    """Where the library multiplies in 8 bits, with multiples of 16, gates are rounded as they are made."""
    if form is Fp8Linear and device.type == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with products of 8-bit numbers")
    monkeypatch.setattr(ops_cuda, "FP8_ROWS", most)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=16), query_heads=4, dtype=torch.bfloat16, device=device
    )
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    hidden = random(3, 128, dtype=torch.bfloat16, device=device)
    up, down = (
        form.empty(*shape, bias=False, dtype=torch.bfloat16, device=device)
        for shape in ((outputs, 128), (128, outputs // 2 if gated else outputs))
    )
    for seed, matrix in enumerate((up, down), start=1):
        matrix.place.copy_(random(*matrix.place.shape, dtype=torch.float32, device=device, seed=seed) / 8)
    norm = Norm(random(128, dtype=torch.float32, device=device, seed=3), None, 1e-5)
    activate = operations.linear_swiglu if gated else operations.linear_gelu
    expected = operations.linear(activate(hidden, up, norm=norm), down)
    part = partial(operations.feed_forward, up=up, down=down, norm=norm, gated=gated)
    launches = Mock(wraps=quantise_rows)
    monkeypatch.setattr(ops_cuda, "quantise_rows", launches)
    assert torch.equal(part(hidden, add=False), expected)
    suits = [most > 2 or not size % 16 for size in (outputs, down.weight.shape[1])]
    both_at_once = gated and most == 2 and all(suits)
    assert launches.call_count == (0 if form is Linear else 1 if both_at_once else sum(suits))
    assert torch.equal(part(hidden.clone(), add=True), hidden + expected)


@pytest.mark.parametrize("form", [Linear, Fp8Linear])
def test_a_norm_that_is_told_ahead_changes_no_number(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, form: type[Linear]
) -> None:
    """By the library. In 8 bits it is in the launch before; if another is asked for, that is computed."""
    if form is Fp8Linear and device.type == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with products of 8-bit numbers")
    for name in ("MAX_ROWS", "FP8_ROWS"):
        monkeypatch.setattr(ops_cuda, name, 2)
    model = SimpleNamespace(
        kv_shape=KVShape(layers=1, heads=2, head_dim=16), query_heads=4, dtype=torch.bfloat16, device=device
    )
    operations = CudaOperations(model, SimpleNamespace(block_size=16), rows=1)
    begun, inputs = (random(3, 128, dtype=torch.bfloat16, device=device, seed=seed) for seed in (1, 2))
    matrix, up, down = (
        form.empty(*shape, bias=False, dtype=torch.bfloat16, device=device)
        for shape in ((128, 128), (256, 128), (128, 128))
    )
    for seed, each in enumerate((matrix, up, down), start=3):
        each.place.copy_(random(*each.place.shape, dtype=torch.float32, device=device, seed=seed) / 8)
    first, second = (
        Norm(random(128, dtype=torch.float32, device=device, seed=seed), None, 1e-5) for seed in (6, 7)
    )

    def layer(*told: Norm | None) -> tuple[Tensor, Tensor]:
        then = [norm and Next(into, norm) for into, norm in zip((up, matrix), told, strict=True)]
        hidden = operations.add_linear(begun.clone(), inputs, matrix, then=then[0])
        hidden = operations.feed_forward(hidden, up, down, norm=first, gated=True, add=True, then=then[1])
        return hidden, operations.linear(hidden, matrix, norm=second)

    launches = Mock(wraps=quantise_rows)
    monkeypatch.setattr(ops_cuda, "quantise_rows", launches)
    expected = layer(None, None)
    in_pieces = launches.call_count
    assert in_pieces == (3 if form is Fp8Linear else 0)
    for told, spared in (((first, second), 2), ((first, None), 1), ((second, second), 1), ((None, first), 0)):
        launches.reset_mock()
        result = layer(*told)
        assert [torch.equal(*pair) for pair in zip(result, expected, strict=True)] == [True, True]
        assert launches.call_count == (in_pieces - spared if form is Fp8Linear else 0)
    operations.add_linear(begun.clone(), inputs, matrix, then=Next(matrix, second))
    others = operations.linear(begun, matrix, norm=second)
    assert torch.equal(others, operations.linear(begun, matrix, norm=second))


def test_sampled_answers_are_the_plain_ones(kernels: Backend, device: torch.device) -> None:
    model = load_model(GOLDEN / "chatglm3", torch.float32, device)
    requests = [
        request("plain", (5, 6, 7), SamplingParams(temperature=0.8, seed=1, max_tokens=2)),
        request("cut", (8, 9), SamplingParams(temperature=1.0, top_p=0.8, top_k=9, seed=2, max_tokens=2)),
        request("greedy", (4, *range(50)), SamplingParams(temperature=0.0, max_tokens=2)),
        request("told", (3, 1), SamplingParams(temperature=1.0, logprobs=2, seed=3, max_tokens=2)),
    ]
    answers = []
    for backend in (PLAIN, kernels):
        made = Engine(model, SMALL, backend=backend)
        for each in requests:
            made.add(each)
        answers.append({key: ids(outputs) for key, outputs in run(made).items()})
    assert answers[0] == answers[1]


def of_one_layer(folder: Path, device: torch.device) -> CausalModel:
    """Return a model whose largest steps are soon interpreted."""
    write_native(folder, "qwen2", **(SHAPE | {"num_hidden_layers": 1}))
    return load_model(folder, torch.float32, device)


def test_the_profile_run_leaves_no_trace_in_answers(
    kernels: Backend, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It uses the tables and workspaces that will serve, but not the cache."""
    cached: list[int] = []

    def after_a_profile_run(
        settings: EngineSettings, model: CausalModel, run_largest: Callable[[], int]
    ) -> Capacity:
        monkeypatch.setattr(KVCache, "allocate", allocate)
        assert run_largest() == 3 + 4 * 3
        return choose_capacity(settings, model)

    own = KVCache.allocate

    def allocate(cache: KVCache, blocks: int) -> None:
        cached.append(blocks)
        own(cache, blocks)

    model = of_one_layer(tmp_path, device)
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=4)
    answers = []
    for choose in (choose_capacity, after_a_profile_run):
        monkeypatch.setattr(engine, "choose_capacity", choose)
        made = Engine(model, SMALL, backend=kernels)
        made.add(request("a", (5, 6, 7), sampling), request("b", range(30), sampling))
        answers.append({key: ids(outputs) for key, outputs in run(made).items()})
    assert answers[0] == answers[1]
    assert cached == [24]


def test_the_largest_step_without_graphs_runs_in_one_block(
    kernels: Backend, device: torch.device, tmp_path: Path
) -> None:
    """A step is longer than a sequence may be, so it is of two."""
    model = of_one_layer(tmp_path, device)
    made = Runner(model, replace(kernels, graphs=False), SMALL, context=32)
    made._cache.keys[:, 1] = 7
    assert made.run_largest() == 0
    assert (made._cache.keys[:, 1] == 7).all()


def test_the_largest_steps_run_in_one_block_and_leave_nothing(
    kernels: Backend, device: torch.device, tmp_path: Path
) -> None:
    model = of_one_layer(tmp_path, device)
    made = Runner(model, kernels, SMALL, context=64)
    # Prompts of 16, 32 and 40 rows; decodes of 1, 2 and 4, each computed, and sampled in three ways.
    assert made.run_largest() == 3 + 4 * 3
    cache = weakref.ref(made._cache)
    gc.disable()
    try:
        del made
        assert cache() is None
    finally:
        gc.enable()
