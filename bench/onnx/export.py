"""Exports a decoder of transformers to ONNX by torch's exporter, checks it, and quantises it.

The graph takes `ids`, [batch, tokens] int64, and for each layer `key_N` and `value_N`, [batch, KV heads,
past, head_dim] float32. It returns `logits` of the last position, [batch, vocabulary], and for each layer
`new_key_N` and `new_value_N`, which have the new tokens, too. All sequences of a batch are of one length.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime import InferenceSession
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

_ATOL = 1e-3
"""Largest error of a logit; they are about 1."""


class DecoderStep(nn.Module):
    """A model of transformers with its KV cache as inputs and outputs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return logits [batch, vocabulary] and the longer cache; `past` is key, value, key, ..."""
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        outputs = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = outputs.past_key_values.layers
        return outputs.logits[:, -1], *(each for layer in layers for each in (layer.keys, layer.values))


def random_past(model: PreTrainedModel, batch: int, length: int) -> tuple[Tensor, ...]:
    """Return a cache of random numbers."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, heads, length, width)
    return tuple(torch.randn(shape) for _ in range(2 * config.num_hidden_layers))


def export(model: PreTrainedModel, path: Path) -> None:
    """Write the model to `path`, its weights beside it."""
    batch, tokens, length = (torch.export.Dim(name) for name in ("batch", "tokens", "past"))
    past = random_past(model, 2, 5)
    names = [f"{part}_{layer}" for layer in range(len(past) // 2) for part in ("key", "value")]
    program = torch.onnx.export(
        DecoderStep(model),
        (torch.zeros((2, 3), dtype=torch.int64), *past),
        dynamo=True,
        input_names=["ids", *names],
        output_names=["logits", *(f"new_{name}" for name in names)],
        dynamic_shapes={"ids": {0: batch, 1: tokens}, "past": tuple({0: batch, 2: length} for _ in past)},
        verbose=False,
    )
    if program is None:
        raise RuntimeError("torch's exporter returned nothing")
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(path, external_data=True)


def largest_error(model: PreTrainedModel, path: Path) -> float:
    """Return the largest difference of a logit or a number of the cache from the original's.

    Tried are a prompt, one token after a cache, and several after one.
    """
    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    worst = 0.0
    for batch, tokens, length in ((1, 7, 0), (2, 1, 9), (3, 4, 5)):
        past = random_past(model, batch, length)
        ids = torch.randint(model.config.vocab_size, (batch, tokens))
        with torch.inference_mode():
            expected = DecoderStep(model)(ids, *past)
        inputs = dict(zip(names, (each.numpy() for each in (ids, *past)), strict=True))
        for given, wanted in zip(session.run(None, inputs), expected, strict=True):
            worst = max(worst, float(np.abs(given - wanted.numpy()).max()))
    return worst


def exported(model: PreTrainedModel, path: Path) -> float:
    """Export and check; return the largest error.

    Raises:
        RuntimeError: the graph does not compute what the model does.
    """
    export(model, path)
    if (error := largest_error(model, path)) > _ATOL:
        raise RuntimeError(f"{path}: wrong by {error}")
    return error


def dynamic_int8(source: Path, target: Path) -> None:
    """Quantise matrices to int8 by outputs; what they multiply is rounded, too, in each product."""
    target.parent.mkdir(parents=True, exist_ok=True)
    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
        extra_options={"MatMulConstBOnly": True},
    )


def blocks_int4(source: Path, target: Path) -> None:
    """Quantise matrices to 4 bits with a scale and a zero for each 128 weights, as our int4 has them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    graph = onnx.load(source)
    quantizer = MatMulNBitsQuantizer(graph, bits=4, block_size=128, is_symmetric=False, accuracy_level=4)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), use_external_data_format=True)


QUANTISED: dict[str, Callable[[Path, Path], None]] = {"int8": dynamic_int8, "int4": blocks_int4}


def size(path: Path) -> int:
    """Return the bytes of a model's files."""
    return sum(each.stat().st_size for each in path.parent.iterdir())
