from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.vllm_cpu import checkpoint
from triton_models.checkpoint import load_model


def test_our_engine_reads_it_and_every_id_has_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = checkpoint.SHAPES["demo"] | {"num_hidden_layers": 1, "vocab_size": 400}
    monkeypatch.setitem(checkpoint.SHAPES, "demo", shape)
    assert checkpoint.write_checkpoint(tmp_path, "demo", torch.float32) > 400 * 256
    model = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert model.vocab_size == 400
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    assert all(tokenizer.decode([id_]) for id_ in range(3, 400))
    assert tokenizer.encode("a b").ids
