"""Trains the model: plain PyTorch over the same forward pass that serves it."""

import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tools.demo.encoding import Sample
from triton_models.checkpoint import load_model
from triton_models.engine.models import Alibi, Next, Rotary
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.ops_torch import PlainMath, rotate_in_place, rotation, split_heads
from triton_models.families import read_shape, tensor_places

log = logging.getLogger(__name__)

_LOG_EVERY = 50
_INIT = 0.02
"""Standard deviation of the initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The training's hyperparameters."""

    steps: int = 6_000
    tokens_per_step: int = 49_152
    warm_up_steps: int = 300
    learning_rate: float = 2e-3
    last_learning_rate: float = 2e-5
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 20_240_601


class _WholeDialogues(PlainMath):
    """Operations over a batch of whole dialogues without a KV cache, for training.

    Padding is at the right of each dialogue, so the causal mask hides it from all real tokens.
    """

    def __init__(self, rows: int, length: int, *, kv_heads: int, device: torch.device) -> None:
        self._rows, self._length, self._kv_heads = rows, length, kv_heads
        self.positions = torch.arange(length, device=device).repeat(rows)

    def attend(
        self,
        layer: int,  # noqa: ARG002 - there is no cache, so every layer is alike
        projected: Tensor,
        rotary: Rotary | Alibi | None,
        *,
        then: Next | None = None,  # noqa: ARG002 - nothing is done ahead
    ) -> Tensor:
        """See `Operations`."""
        if isinstance(rotary, Alibi):
            raise TypeError("models whose scores fall with the distance are not trained")
        if rotary is not None:
            rotate_in_place(projected[:, : -self._kv_heads], rotation(rotary, self.positions))
        queries, keys, values = (
            each.view(self._rows, self._length, *each.shape[1:]).transpose(1, 2)
            for each in split_heads(projected, self._kv_heads)
        )
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


GO_ON = Recipe(
    steps=320, tokens_per_step=1_024, warm_up_steps=20, learning_rate=3e-4, last_learning_rate=1e-5
)
"""For a trained model whose pages have changed: minutes on a CPU."""


def train(
    directory: Path, samples: Sequence[Sample], recipe: Recipe, device: torch.device, *, go_on: bool = False
) -> Decoder:
    """Train a new model with the configuration in `directory`, or, to `go_on`, the model that is there.

    The weights are float32; on a GPU, matrix products are computed in bfloat16 (autocast).
    """
    torch.manual_seed(recipe.seed)
    if go_on:
        model = load_model(directory, torch.float32, device)
        places = tensor_places(model)
    else:
        model = Decoder(read_shape(directory), dtype=torch.float32, device=device)
        places = tensor_places(model)
        _initialise(places, model.config.layers)
    for tensor in places.values():
        tensor.requires_grad_()
    matrices = [tensor for tensor in places.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in places.values() if tensor.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    batches = _batches(samples, recipe)
    started = time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        ids, learned = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _loss(model, ids, learned)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], recipe.clip)
        optimizer.step()
        if step % _LOG_EVERY == 0 or step + 1 == recipe.steps:
            log.info("step %d: loss %.4f, %.0f s", step, loss.item(), time.monotonic() - started)
    for tensor in places.values():
        tensor.requires_grad = False
    return model


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine."""
    if step < recipe.warm_up_steps:
        return recipe.learning_rate * (step + 1) / recipe.warm_up_steps
    done = (step - recipe.warm_up_steps) / max(1, recipe.steps - recipe.warm_up_steps)
    half = 0.5 * (1 + math.cos(math.pi * done))
    return recipe.last_learning_rate + (recipe.learning_rate - recipe.last_learning_rate) * half


def _initialise(places: Mapping[str, Tensor], layers: int) -> None:
    """Initialise the weights, with smaller ones where a layer adds to the residual."""
    residual = _INIT / math.sqrt(2 * layers)
    for name, tensor in places.items():
        if name.endswith("layernorm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            writes = name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
            tensor.normal_(0.0, residual if writes else _INIT)


def _loss(model: Decoder, ids: Tensor, learned: Tensor) -> Tensor:
    """Return the mean cross-entropy over those of `ids` marked in `learned`, both of shape [rows, length]."""
    rows, length = ids.shape
    wanted = learned[:, 1:].nonzero()
    targets = ids[wanted[:, 0], wanted[:, 1] + 1]
    operations = _WholeDialogues(rows, length, kv_heads=model.kv_shape.heads, device=ids.device)
    hidden = model.forward(ids.flatten(), operations)
    logits = model.logits(hidden[wanted[:, 0] * length + wanted[:, 1]], operations)
    return cross_entropy(logits.float(), targets)


def _batches(samples: Sequence[Sample], recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of dialogues of similar length without end, in another order in every epoch."""
    rng = random.Random(recipe.seed)
    while True:
        order = sorted(range(len(samples)), key=lambda at: (len(samples[at].ids) // 16, rng.random()))
        batches: list[list[Sample]] = [[]]
        for at in order:
            # Sorted by length, so the next one would be the longest of its batch.
            if (len(batches[-1]) + 1) * len(samples[at].ids) > recipe.tokens_per_step:
                batches.append([])
            batches[-1].append(samples[at])
        rng.shuffle(batches)
        for batch in batches:
            yield _pad(batch)


def _pad(batch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return ids and learned flags, both of shape [rows, length]; padding is not learned."""
    shape = len(batch), max(len(sample.ids) for sample in batch)
    ids, learned = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = sample.ids
        learned[row, : len(sample.ids)] = sample.learned
    return torch.from_numpy(ids), torch.from_numpy(learned)
