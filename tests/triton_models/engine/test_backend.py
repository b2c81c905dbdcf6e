import logging
from dataclasses import replace

import pytest
import torch

from tests.triton_models.engine.fake_model import ids, request, run
from triton_models.engine import backend
from triton_models.engine.backend import PLAIN, choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.linear import PackedLinear, why_not_packed
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.models.positions import Rope
from triton_models.engine.ops_cpu import CompiledLinear, NotCompiledError
from triton_models.engine.settings import EngineSettings

CPU = torch.device("cpu")
SHAPE = DecoderConfig(
    layers=2,
    hidden=32,
    feed_forward=48,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    vocabulary=70,
    positions=64,
    epsilon=1e-5,
    rope=Rope(share=0.5, base=10_000.0),
    qkv_bias=True,
)


def small_model() -> Decoder:
    model = Decoder(SHAPE, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(4)
    for layer in model.layers:
        assert layer.qkv.bias is not None
        layer.qkv.weight.normal_(std=0.3, generator=generator)
        layer.qkv.bias.normal_(std=0.3, generator=generator)
        for matrix in (layer.attention_out, layer.up, layer.down):
            matrix.weight.normal_(std=0.3, generator=generator)
        layer.input_norm.weight.fill_(1)
        layer.feed_forward_norm.weight.fill_(1)
    model.final_norm.weight.fill_(1)
    for tensor in (model.embedding, model.head.weight):
        tensor.normal_(generator=generator)
    return model


def answer(engine: Engine) -> list[int]:
    engine.add(request("r", range(1, 30)))
    return ids(run(engine)["r"])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C compiler."""

    def fail() -> None:
        raise NotCompiledError("no compiler")

    monkeypatch.setattr(backend, "compiled", fail)


def test_a_processor_computes_by_what_is_compiled_for_it(caplog: pytest.LogCaptureFixture) -> None:
    expected = answer(Engine(small_model(), EngineSettings(), backend=PLAIN))
    model = small_model()
    with caplog.at_level(logging.INFO):
        engine = Engine(model, EngineSettings())
    assert "operations compiled for this CPU" in caplog.text
    matrices = [model.head] + [layer.down for layer in model.layers]
    assert all(isinstance(each, CompiledLinear) for each in matrices)
    assert answer(engine) == expected
    # Whoever computes with the model afterwards, by the plain operations or in another engine, still can.
    assert answer(Engine(model, EngineSettings(), backend=PLAIN)) == expected
    assert answer(Engine(model, EngineSettings())) == expected
    assert model.head is matrices[0]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_multiplies_by_packed_matrices(caplog: pytest.LogCaptureFixture) -> None:
    assert why_not_packed(torch.float32) is None
    expected = answer(Engine(small_model(), EngineSettings(), backend=PLAIN))
    model = small_model()
    with caplog.at_level(logging.INFO):
        engine = Engine(model, EngineSettings())
    assert "torch operations for the CPU (no compiler), packed matrices" in caplog.text
    matrices = [model.head] + [layer.down for layer in model.layers]
    assert all(isinstance(each, PackedLinear) for each in matrices)
    assert answer(engine) == expected
    assert answer(Engine(model, EngineSettings(), backend=PLAIN)) == expected
    assert answer(Engine(model, EngineSettings())) == expected


@pytest.mark.usefixtures("no_compiler")
def test_where_they_cannot_be_packed_they_stay_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "why_not_packed", lambda dtype: f"no {dtype} here")
    expected = answer(Engine(small_model(), EngineSettings(), backend=PLAIN))
    model = small_model()
    with caplog.at_level(logging.INFO):
        engine = Engine(model, EngineSettings())
    assert "matrices as they are (no torch.float32 here)" in caplog.text
    assert not isinstance(model.head, PackedLinear)
    assert answer(engine) == expected


def test_other_devices_compute_plainly() -> None:
    assert choose_backend(torch.device("meta"), torch.float32) is PLAIN
    assert choose_backend(CPU, torch.float32).convert is not None


@pytest.mark.parametrize(
    ("capability", "dtype", "size"),
    [
        ((9, 0), torch.bfloat16, 64),
        ((9, 0), torch.float16, 64),
        ((9, 0), torch.float32, 16),
        ((8, 9), torch.bfloat16, 16),
        ((10, 0), torch.bfloat16, 16),
    ],
)
def test_blocks_are_as_large_as_what_hopper_copies_at_once(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(backend, "find_spec", lambda _: "there")
    monkeypatch.setattr(backend, "cuda_backend", lambda _: PLAIN)
    assert choose_backend(torch.device("cuda:0"), dtype).block_size == size


def test_an_engine_has_blocks_of_its_backends_size_unless_told_otherwise() -> None:
    suited = replace(PLAIN, block_size=32)
    assert Engine(small_model(), EngineSettings(), backend=suited).settings.block_size == 32
    chosen = EngineSettings(block_size=4, kv_blocks=9)
    assert Engine(small_model(), chosen, backend=suited).settings.block_size == 4
