import logging

import pytest
import torch

from tests.triton_models.engine.fake_model import ids, request, run
from triton_models.engine import backend, linear
from triton_models.engine.backend import PLAIN, choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.linear import PackedLinear, why_not_packed
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.engine.models.positions import Rope
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


def test_a_processor_multiplies_by_packed_matrices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "_SMALL", 0)
    assert why_not_packed(torch.float32) is None
    expected = answer(Engine(small_model(), EngineSettings(), backend=PLAIN))
    model = small_model()
    with caplog.at_level(logging.INFO):
        engine = Engine(model, EngineSettings())
    assert "packed matrices" in caplog.text
    assert isinstance(model.head, PackedLinear)
    assert all(isinstance(layer.down, PackedLinear) for layer in model.layers)
    assert answer(engine) == expected
    # Whoever computes with the model afterwards, by the plain operations or in another engine, still can.
    assert answer(Engine(model, EngineSettings(), backend=PLAIN)) == expected
    assert answer(Engine(model, EngineSettings())) == expected


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
