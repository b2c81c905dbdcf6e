import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import checkpoint
from bench.gpu.checkpoint import TINY, write_checkpoint
from bench.gpu.tokenizer import tokenizer_model
from triton_models.checkpoint import load_model
from triton_models.directory import detect_format
from triton_models.families import read_shape
from triton_models.text.tokenizers import load_tokenizer

CPU = torch.device("cpu")


def test_what_is_written_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 9_000_000)
    small = replace(TINY, layers=1)
    size = write_checkpoint(tmp_path, small, CPU)
    assert read_shape(tmp_path) == small
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert size < sum(shard.stat().st_size for shard in shards) < size + 10_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    model = load_model(tmp_path, torch.bfloat16, CPU)
    assert model.head.weight.float().std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(model.head.weight, model.embedding)

    assert detect_format(tmp_path) == "chatglm3"
    tokenizer = load_tokenizer(tmp_path, "chatglm3")
    pieces = min(tokenizer.special_ids.values())
    assert tokenizer.size == small.vocabulary
    text = "hello the 世界 world 12\n👋"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Every id that the load generator sends, and nearly every one that is sampled, shows as text at once.
    assert all(isinstance(tokenizer.piece(token_id), str) for token_id in range(300, pieces))
    assert len({tokenizer.piece(token_id) for token_id in range(300, pieces)}) == pieces - 300


def test_a_tokenizer_needs_its_bytes() -> None:
    with pytest.raises(ValueError, match="too few"):
        tokenizer_model(511)
