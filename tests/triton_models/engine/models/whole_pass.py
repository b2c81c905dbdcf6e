"""The model's own forward pass over a whole sequence: what the engine's steps have to come to."""

import torch

from tests.triton_models.engine.rotated import rotate_in_place
from triton_models.engine.models import Alibi, CausalModel, Next, Rotary
from triton_models.engine.ops_torch import PlainMath, split_heads


def whole_pass(model: CausalModel, tokens: list[int]) -> torch.Tensor:
    """The logits behind `tokens`, with attention that needs no cache."""
    return whole_passes(model, tokens)[-1]


def whole_passes(model: CausalModel, tokens: list[int]) -> torch.Tensor:
    """The logits behind each of `tokens`."""
    operations = WholeSequence(len(tokens), model.kv_shape.heads)
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(tokens), operations), operations)


class WholeSequence(PlainMath):
    """One sequence without a cache."""

    def __init__(self, length: int, kv_heads: int) -> None:
        self.positions = torch.arange(length)
        self._kv_heads = kv_heads

    def attend(
        self,
        layer: int,
        projected: torch.Tensor,
        rotary: Rotary | Alibi | None,
        *,
        then: Next | None = None,
    ) -> torch.Tensor:
        distances = self.positions - self.positions[:, None]
        mask = torch.zeros(distances.shape)
        if isinstance(rotary, Rotary):
            cos, sin = rotary.cos[self.positions, None], rotary.sin[self.positions, None]
            rotate_in_place(projected[:, : -self._kv_heads], cos, sin)
        elif isinstance(rotary, Alibi):
            mask = rotary.slopes[:, None, None] * distances
        queries, keys, values = (each.transpose(0, 1) for each in split_heads(projected, self._kv_heads))
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask.masked_fill(distances > 0, -torch.inf), enable_gqa=True
        )
        return attended.transpose(0, 1).flatten(1)
