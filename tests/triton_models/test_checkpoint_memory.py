"""Loading needs little more memory than the model (measured in a process of its own), or is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triton_models import checkpoint
from triton_models.checkpoint import load_model
from triton_models.errors import CheckpointError
from triton_models.families import read_shape

GOLDEN = Path(__file__).parents[1] / "golden"
HEAD = "transformer.output_layer.weight"

MEASURE = """
import sys
from pathlib import Path
import torch
from triton_models.checkpoint import load_model

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

before = resident("VmRSS")
how = sys.argv[2] or None
model = load_model(Path(sys.argv[1]), torch.float32, torch.device("cpu"), quantization=how)
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize("key", ["num_layers", "hidden_size", "padded_vocab_size", "seq_length"])
@pytest.mark.parametrize("value", [10**12, 10**30])
def test_a_model_that_no_machine_holds_is_refused_before_it_is_allocated(
    tmp_path: Path, key: str, value: int
) -> None:
    config = json.loads((GOLDEN / "chatglm3" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / "chatglm3" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json: a model of this shape takes .* GiB"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("quantization", "share", "words"),
    [
        (None, 0.5, r"GiB in torch\.float32, .* with quantization int8 it takes"),
        (None, 0.2, r"GiB in torch\.float32, .* with quantization int4 it takes"),
        ("int8", 0.2, "GiB in int8, .* with quantization int4 it takes"),
        ("int4", 0.1, "GiB in int4, .* no quantization would fit: int4 takes"),
    ],
)
def test_the_refusal_says_which_quantization_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None, share: float, words: str
) -> None:
    config = json.loads((GOLDEN / "chatglm3" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_layers": 40, "hidden_size": 4096, "ffn_hidden_size": 13696}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / "chatglm3" / "model.safetensors")
    there = int(share * read_shape(tmp_path).nbytes(torch.float32))
    monkeypatch.setattr(checkpoint, "total_bytes", lambda _device: there)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path, torch.float32, torch.device("cpu"), quantization=quantization)


@pytest.mark.parametrize(
    ("suffix", "quantization"), [("safetensors", ""), ("bin", ""), ("safetensors", "int4")]
)
def test_the_peak_of_memory_is_about_one_shard_above_the_model(
    tmp_path: Path, suffix: str, quantization: str
) -> None:
    config = json.loads((GOLDEN / "chatglm3" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 4608}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = _zeros_for(tmp_path)
    paths = [tmp_path / f"shard-{number}.{suffix}" for number in range(6)]
    shards = [
        {name: tensor for name, tensor in tensors.items() if _shard_of(name) == number} for number in range(6)
    ]
    for path, part in zip(paths, shards, strict=True):
        if suffix == "safetensors":
            save_file(part, path)
        else:
            torch.save(part, path)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = {"weight_map": {name: paths[_shard_of(name)].name for name in tensors}}
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    shard = max(path.stat().st_size for path in paths)
    model = sum(tensor.nbytes for tensor in tensors.values())
    assert shard > 28e6
    assert model > 5 * shard
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path, quantization], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if quantization:
        # The embedding is not quantised; what is quantised at once takes a few times its size in float32.
        model, shard = model // 5, 3 * shard
    assert model < int(done.stdout) < model + 1.8 * shard


def _shard_of(name: str) -> int:
    return int(name.split(".")[3]) if ".layers." in name else 0


def _zeros_for(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors of the names and shapes that a checkpoint with this configuration has."""
    config = read_shape(directory)
    hidden, ffn, vocabulary = config.hidden, config.feed_forward, config.vocabulary
    qkv = config.query_width + 2 * config.kv_width
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (vocabulary, hidden),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        HEAD: (vocabulary, hidden),
    }
    for number in range(config.layers):
        prefix = f"transformer.encoder.layers.{number}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attention.query_key_value.weight": (qkv, hidden),
            prefix + "self_attention.query_key_value.bias": (qkv,),
            prefix + "self_attention.dense.weight": (hidden, config.query_width),
            prefix + "mlp.dense_h_to_4h.weight": (2 * ffn, hidden),
            prefix + "mlp.dense_4h_to_h.weight": (hidden, ffn),
        }
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
