import logging

import pytest
import torch

from tests.triton_models.engine.fake_model import ids, request, run
from triton_models.engine import backend
from triton_models.engine.backend import PLAIN, choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.linear import PackedLinear, pack, why_not_packed
from triton_models.engine.models.chatglm import ChatGLM, ChatGLMConfig
from triton_models.engine.settings import EngineSettings

CPU = torch.device("cpu")
SHAPE = ChatGLMConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    multi_query_group_num=2,
    kv_channels=8,
    padded_vocab_size=70,
    seq_length=64,
    layernorm_epsilon=1e-5,
    add_qkv_bias=True,
)


def small_model() -> ChatGLM:
    model = ChatGLM(SHAPE, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(4)
    for layer in model.layers:
        assert layer.qkv.bias is not None
        layer.qkv.weight.normal_(std=0.3, generator=generator)
        layer.qkv.bias.normal_(std=0.3, generator=generator)
        for matrix in (layer.attention_out, layer.gate_up, layer.down):
            matrix.weight.normal_(std=0.3, generator=generator)
        layer.input_norm.fill_(1)
        layer.post_attention_norm.fill_(1)
    model.final_norm.fill_(1)
    for tensor in (model.embedding, model.head.weight):
        tensor.normal_(generator=generator)
    return model


def answer(engine: Engine) -> list[int]:
    engine.add(request("r", range(1, 30)))
    return ids(run(engine)["r"])


def test_a_processor_multiplies_by_packed_matrices(caplog: pytest.LogCaptureFixture) -> None:
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
    assert choose_backend(CPU, torch.float32).convert is pack
