import platform
import random
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.triton_models.engine import paged
from tests.triton_models.engine.paged import Heads, PagedSequence, attend_in_turns
from triton_models.engine import ops_cpu, sampler
from triton_models.engine.linear import Linear
from triton_models.engine.models import Alibi, Norm, Rotary
from triton_models.engine.ops_cpu import (
    CompiledLinear,
    CpuOperations,
    choose,
    compile_linear,
    compiled,
    cpu_operations,
)
from triton_models.engine.ops_torch import PlainMath, TorchOperations
from triton_models.engine.quantised import Fp8Linear, Int4Linear, Int8Linear, QuantisedLinear
from triton_models.engine.sampler import SamplerInputs

ROWS = [0, 1, 2, 5, 6, 7, 8, 9, 63, 64, 65, 130]
"""Of which the products take some together, and tiles of 64."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many threads for any work, however little."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def operations(heads: Heads, block_size: int = 16, blocks: int = 30) -> CpuOperations:
    return CpuOperations(heads.model, heads.cache(blocks, block_size))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("outputs", "columns"), [(1, 1), (7, 33), (64, 64), (130, 513), (96, 1100), (600, 700)]
)
def test_products_of_any_shape(outputs: int, columns: int) -> None:
    torch.manual_seed(outputs)
    weight, bias = torch.randn(outputs, columns), torch.randn(outputs)
    plain, biased = CompiledLinear(Linear(weight)), CompiledLinear(Linear(weight, bias))
    inputs, hidden = torch.randn(ROWS[-1], columns), torch.randn(ROWS[-1], outputs)
    product = inputs.double() @ weight.double().T
    for rows in ROWS:
        for given, expected in (
            (plain(inputs[:rows]), product),
            (biased(inputs[:rows]), product + bias),
            (plain.add(hidden[:rows], inputs[:rows]), product + hidden),
            (biased.add(hidden[:rows], inputs[:rows]), product + hidden + bias),
        ):
            assert given.dtype == torch.float32
            torch.testing.assert_close(given.double(), expected[:rows], rtol=1e-6, atol=1e-3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "columns"), [(7, 33), (130, 513), (96, 1100)])
def test_products_with_16_bits_are_those_with_the_same_numbers_in_32(
    dtype: torch.dtype, outputs: int, columns: int
) -> None:
    torch.manual_seed(outputs)
    numbers = torch.randn(outputs, columns) * 10.0 ** torch.randint(
        -9, 4, (outputs, columns)
    )  # some subnormal
    weight, bias = numbers.clamp(-6e4, 6e4).to(dtype), torch.randn(outputs).to(dtype)
    own = operations(Heads(2, 2, 8))
    narrow, wide = CompiledLinear(Linear(weight, bias)), CompiledLinear(Linear(weight.float(), bias.float()))
    assert narrow.weight.nbytes == wide.weight.nbytes // 2
    inputs, hidden = torch.randn(ROWS[-1], columns), torch.randn(ROWS[-1], outputs)
    for rows in ROWS:
        given, expected = (
            (each(inputs[:rows]), each.add(hidden[:rows], inputs[:rows])) for each in (narrow, wide)
        )
        assert all(map(torch.equal, given, expected))
        if outputs % 2 == 0:
            gated = [own.linear_swiglu(inputs[:rows], each) for each in (narrow, wide)]
            assert torch.equal(*gated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[:, None]
    given = CompiledLinear(Linear(numbers))(torch.ones(1, 1))[0]
    torch.testing.assert_close(given, numbers[:, 0].float(), rtol=0, atol=0, equal_nan=True)


def test_inputs_may_be_views() -> None:
    torch.manual_seed(1)
    weight = torch.randn(40, 24)
    inputs, hidden = torch.randn(24, 6).T, torch.randn(40, 6).T
    matrix = CompiledLinear(Linear(weight))
    torch.testing.assert_close(matrix(inputs), inputs @ weight.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(matrix.add(hidden, inputs), hidden + inputs @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [48, 32, 20])  # the last is not made of whole panels
@pytest.mark.parametrize("biased", [False, True])
def test_gated_products(width: int, *, biased: bool) -> None:
    torch.manual_seed(width)
    own = operations(Heads(2, 2, 8))
    plain = Linear(torch.randn(2 * width, 40), torch.randn(2 * width) if biased else None)
    norm = Norm(torch.randn(40), None, 1e-5)
    for rows in ROWS:
        inputs = torch.randn(rows, 40)
        for given, normed in ((None, inputs), (norm, PlainMath().norm(inputs, norm))):
            gate, up = plain(normed).double().chunk(2, dim=-1)
            result = own.linear_swiglu(inputs, CompiledLinear(plain), norm=given)
            torch.testing.assert_close(result.double(), silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [96, 1090])  # the second is not made of whole panels
@pytest.mark.parametrize("threads", [1, 3])
def test_a_result_does_not_depend_on_the_rows_beside_it(
    outputs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(2)
    own = operations(Heads(2, 2, 8))
    matrix, norm = CompiledLinear(Linear(torch.randn(outputs, 1100))), Norm(torch.randn(1100), None, 1e-5)
    inputs, hidden = torch.randn(130, 1100), torch.randn(130, outputs)

    def compute(start: int, stop: int) -> list[Tensor]:
        rows = inputs[start:stop]
        return [
            own.linear(rows, matrix, norm=norm),
            own.add_linear(hidden[start:stop], rows, matrix),
            own.linear_swiglu(rows, matrix),
            own.linear_gelu(rows, matrix, norm=norm),
        ]

    whole = compute(0, 130)
    for start, stop in ((0, 1), (3, 5), (7, 16), (64, 130)):
        for given, expected in zip(compute(start, stop), whole, strict=True):
            assert torch.equal(given, expected[start:stop])


def test_gelu() -> None:
    torch.manual_seed(6)
    own, plain = operations(Heads(2, 2, 8)), Linear(torch.randn(70, 40), torch.randn(70))
    norm = Norm(torch.randn(40), None, 1e-5)
    for rows in ROWS:
        inputs = torch.randn(rows, 40)
        expected = PlainMath().linear_gelu(inputs, plain, norm=norm)
        given = own.linear_gelu(inputs, CompiledLinear(plain), norm=norm)
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def quantise(form: type[QuantisedLinear], weight: Tensor, bias: Tensor | None = None) -> QuantisedLinear:
    matrix = form.empty(*weight.shape, bias=bias is not None, dtype=torch.float32, device=torch.device("cpu"))
    matrix.place.copy_(weight)
    if bias is not None and matrix.bias is not None:
        matrix.bias.copy_(bias)
    return matrix


forms = pytest.mark.parametrize("form", [Int8Linear, Int4Linear])


@pytest.mark.usefixtures("threads")
@forms
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (7, 33), (64, 128), (130, 513), (96, 1100)])
def test_products_with_quantised_weights(form: type[QuantisedLinear], outputs: int, columns: int) -> None:
    torch.manual_seed(outputs)
    quantised = quantise(form, torch.randn(outputs, columns), torch.randn(outputs))
    matrix = compile_linear(quantised)
    assert isinstance(matrix, CompiledLinear)
    assert quantised.bias is not None
    product = quantised.exact(0, outputs).double()
    inputs, hidden = torch.randn(ROWS[-1], columns), torch.randn(ROWS[-1], outputs)
    expected = inputs.double() @ product.T + quantised.bias
    for rows in ROWS:
        for given, wanted in (
            (matrix(inputs[:rows]), expected),
            (matrix.add(hidden[:rows], inputs[:rows]), expected + hidden),
        ):
            torch.testing.assert_close(given.double(), wanted[:rows], rtol=1e-6, atol=1e-3)
    part = matrix(inputs[7:9])
    assert torch.equal(part, matrix(inputs)[7:9])


@forms
def test_so_they_are_gated(form: type[QuantisedLinear]) -> None:
    torch.manual_seed(3)
    own = operations(Heads(2, 2, 8))
    for width in (48, 20):
        quantised = quantise(form, torch.randn(2 * width, 300))
        inputs = torch.randn(9, 300)
        gate, up = (inputs.double() @ quantised.exact(0, 2 * width).double().T).chunk(2, dim=-1)
        given = own.linear_swiglu(inputs, compile_linear(quantised))
        torch.testing.assert_close(given.double(), silu(gate) * up, rtol=1e-4, atol=1e-3)


def test_matrices_without_a_compiled_form_stay() -> None:
    matrix = compile_linear(Linear(torch.ones(4, 4)))
    assert isinstance(matrix, CompiledLinear)
    assert compile_linear(matrix) is matrix
    fp8 = quantise(Fp8Linear, torch.ones(4, 32))
    assert compile_linear(fp8) is fp8


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("width", [16, 24, 4096])
def test_norm(width: int, size: float) -> None:
    torch.manual_seed(1)
    hidden, weight = size * torch.randn(70, width), torch.randn(width)
    kept = hidden.clone()
    norm = Norm(weight, None, 1e-5)
    torch.testing.assert_close(operations(Heads(2, 2, 8)).norm(hidden, norm), PlainMath().norm(hidden, norm))
    assert torch.equal(hidden, kept)
    views = hidden.T.contiguous().T
    torch.testing.assert_close(operations(Heads(2, 2, 8)).norm(views, norm), PlainMath().norm(hidden, norm))


def test_layer_norms_are_torchs() -> None:
    hidden, norm = torch.randn(3, 32), Norm(torch.randn(32), torch.randn(32), 1e-5)
    assert torch.equal(operations(Heads(2, 2, 8)).norm(hidden, norm), PlainMath().norm(hidden, norm))


SHAPES = [Heads(6, 2, 8), Heads(4, 4, 32), Heads(12, 2, 40), Heads(16, 1, 64), Heads(3, 3, 7)]
shapes = pytest.mark.parametrize(
    "heads", SHAPES, ids=lambda heads: f"{heads.heads}-{heads.kv_heads}-{heads.head_dim}"
)


@pytest.mark.usefixtures("threads")
@shapes
@pytest.mark.parametrize("position", [None, "rotary", "alibi"])
def test_any_mixture_of_decodes_and_chunks_equals_whole_sequences(heads: Heads, position: str | None) -> None:
    torch.manual_seed(3)
    numbers = random.Random(1)
    angles = torch.rand(400, max(1, heads.head_dim // 4)) * 6
    rotary = {
        None: None,
        "rotary": Rotary(angles.cos(), angles.sin()),
        "alibi": Alibi(torch.rand(heads.heads)),
    }[position]
    for block_size in (16, 64):
        cache = heads.cache(60, block_size)
        own = CpuOperations(heads.model, cache)
        blocks = list(range(1, 61))
        numbers.shuffle(blocks)
        sequences = [
            PagedSequence(length, [blocks.pop() for _ in range(-(-length // block_size))], heads, rotary)
            for length in (290, 64, 17, 1)
        ]
        step = partial(paged.attend, own, block_size, 1, rotary=rotary)
        attend_in_turns(step, sequences, numbers, counts=(0, 1, 1, 9, 40, 130))
        assert cache.keys[0, 1:].isnan().all()


@shapes
def test_a_rows_attention_does_not_depend_on_how_its_sequence_was_divided(heads: Heads) -> None:
    torch.manual_seed(4)
    sequence, other = PagedSequence(200, list(range(13, 0, -1)), heads), PagedSequence(5, [14], heads)
    whole = paged.attend(operations(heads), 16, 0, [], [(sequence, 0, 200)])
    own = operations(heads)
    for start, end in ((0, 3), (3, 150), (150, 199)):
        parts = paged.attend(own, 16, 0, [], [(sequence, start, end), (other, 0, 5)])
        assert torch.equal(parts[: end - start], whole[start:end])
    assert torch.equal(paged.attend(own, 16, 0, [(sequence, 199)], [])[0], whole[199])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86's")
@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_processors_with_shorter_registers(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [f"-march={level}" if flag == "-march=native" else flag for flag in ops_cpu._FLAGS]
    monkeypatch.setattr(ops_cpu, "_FLAGS", flags)
    assert compiled().lanes() == {"x86-64-v3": 8, "x86-64": 4}[level]
    test_products_of_any_shape(130, 513)
    test_gated_products(48, biased=True)
    for dtype in (torch.bfloat16, torch.float16):
        test_products_with_16_bits_are_those_with_the_same_numbers_in_32(dtype, 130, 513)
        test_every_number_of_16_bits_is_read(dtype)
    for form in (Int8Linear, Int4Linear):
        test_products_with_quantised_weights(form, 130, 513)
    for heads in SHAPES[:3]:
        test_any_mixture_of_decodes_and_chunks_equals_whole_sequences(heads, "rotary")
    test_the_same_tokens_are_chosen_as_in_python(2047)


def test_what_is_not_finite_is_not_hidden() -> None:
    heads = Heads(2, 2, 8)
    sequence = PagedSequence(20, [1, 2], heads)
    own = operations(heads)
    paged.attend(own, 16, 0, [], [(sequence, 0, 19)])
    projected = sequence.projected[19:].clone()
    projected[0, 0, 0] = torch.nan
    own.begin(paged.layout([(sequence, 19)], [], 16))
    attended = own.attend(0, projected, None).view(2, 8)
    assert attended[0].isnan().all()
    assert attended[1].isfinite().all()


def test_other_sizes_of_blocks_are_torchs() -> None:
    heads = Heads(2, 2, 8)
    assert isinstance(cpu_operations(heads.model, heads.cache(4, 4), 1), TorchOperations)
    assert isinstance(cpu_operations(heads.model, heads.cache(4, 16), 1), CpuOperations)


def rules(rows: int, **changes: Tensor | bool) -> SamplerInputs:
    fields: dict[str, Tensor | bool] = {
        "temperatures": torch.rand(rows) * 1.5 + 0.3,
        "seeds": torch.randint(0, 2**40, (rows,)),
        "counters": torch.randint(0, 4000, (rows,)),
        "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.ones(rows, dtype=torch.float64),
        "min_p": torch.zeros(rows, dtype=torch.float64),
    }
    return SamplerInputs(**fields | changes)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocabulary", [1, 5, 64, 2047, 30_000])
def test_the_same_tokens_are_chosen_as_in_python(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    for spread in (0.1, 2.0, 30.0):
        logits = torch.randn(50, vocabulary) * spread
        logits[torch.rand(logits.shape) < 0.1] = -torch.inf
        inputs = rules(50)
        inputs.temperatures[::5] = 0
        assert torch.equal(choose(logits.clone(), inputs), sampler.choose(logits, inputs))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 5, 64, 2047, 30_000])
def test_so_they_are_of_rows_with_limits(vocabulary: int, equal: bool) -> None:
    """`equal`: many logits are, so that limits lie among equal ones."""
    torch.manual_seed(vocabulary)
    for spread in (0.1, 2.0, 30.0):
        logits = torch.randn(120, vocabulary) * spread
        if equal:
            logits = (logits * 2).round() / 2
        logits[torch.rand(logits.shape) < 0.1] = -torch.inf
        inputs = rules(120, truncated=True)
        some = torch.rand(3, 120) < 0.6
        inputs.top_k[some[0]] = torch.randint(1, 200, (int(some[0].sum()),))
        inputs.top_p[some[1]] = torch.rand(int(some[1].sum()), dtype=torch.float64)
        inputs.min_p[some[2]] = torch.rand(int(some[2].sum()), dtype=torch.float64) ** 3
        inputs.temperatures[::7] = 0
        assert torch.equal(choose(logits.clone(), inputs), sampler.choose(logits, inputs))


@pytest.mark.parametrize(
    "limits",
    [
        (0, 0.0, 0.0),
        (0, 1 - 1e-15, 0.0),
        (1, 1.0, 0.0),
        (2**31 - 1, 0.5, 1.0),
        (99, 1.0, 1e-300),
        (100, 1.0, 0.0),
    ],
)
def test_extreme_limits_are_kept(limits: tuple[int, float, float]) -> None:
    torch.manual_seed(6)
    logits = torch.randn(200, 100) * 5
    logits[::2, 7:] -= 1e30
    inputs = rules(200, truncated=True)
    inputs.top_k[:], inputs.top_p[:], inputs.min_p[:] = limits
    assert torch.equal(choose(logits.clone(), inputs), sampler.choose(logits, inputs))


def test_what_is_not_finite_is_reported_of_rows_with_limits() -> None:
    torch.manual_seed(5)
    logits = torch.randn(40, 300)
    inputs = rules(40, truncated=True)
    inputs.top_k[:10], inputs.top_p[5:20], inputs.min_p[15:30] = 7, 0.8, 0.1
    inputs.temperatures[::3] = 0
    logits[2], logits[4, 5], logits[5, :250] = -torch.inf, torch.inf, -torch.inf
    faulty = [2, 3, 4, 5, 7, 11, 17, 25]
    logits[[3, 7, 11, 17, 25], 4] = torch.nan  # greedy, and with limits of each kind
    given, expected = choose(logits.clone(), inputs), sampler.choose(logits, inputs)
    assert given[1].tolist() == expected[1].tolist() == [int(row not in faulty) for row in range(40)]
    assert given[0, 5] == expected[0, 5]
    whole = given[1].bool()
    assert torch.equal(given[:, whole], expected[:, whole])
    assert given[2, 2] == expected[2, 2] == 0


def test_of_equal_logits_the_first_is_the_most_likely() -> None:
    logits = torch.zeros(2, 100)
    logits[1, 70:] = 1
    assert choose(logits, rules(2, temperatures=torch.zeros(2)))[0].tolist() == [0, 70]
