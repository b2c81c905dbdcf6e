"""The usual way to serve: transformers' `generate` on padded, static batches.

ChatGLM's own code no longer runs on today's transformers. The native `Glm` class of transformers has the same
arithmetic (half of each head rotated in pairs, grouped queries, a bias only for queries, keys and values,
SwiGLU with one fused matrix), so it takes the weights of our model as they are, and gives the same answers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GlmConfig, GlmForCausalLM

from bench.usual_work import TEMPERATURE, TOP_P, Job
from triton_models.engine.models.decoder import Decoder, DecoderConfig
from triton_models.families import tensor_names


class PaddedGenerate:
    """Runs a ChatGLM through transformers' `generate`, sharing the model's matrices."""

    def __init__(self, model: Decoder) -> None:
        config = _native_config(model.config)
        with torch.device("meta"):
            native = GlmForCausalLM(config)
        native.load_state_dict(_native_weights(model), assign=True)
        # Its tables are not weights, so they were created on the meta device, which holds no data.
        native.model.rotary_emb = type(native.model.rotary_emb)(config).to(model.device)
        native.eval()
        self._native = native
        self._device = model.device

    def answer(self, batch: Sequence[Job]) -> list[list[int]]:
        """Sample until the batch's longest answer ends; return each answer cut to its requested length."""
        longest = max(len(job.prompt) for job in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        answers = self._generate(
            ids,
            mask,
            max_new_tokens=max(job.answer for job in batch),
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            top_k=0,
        )
        return [row[: job.answer] for row, job in zip(answers, batch, strict=True)]

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Return the greedy continuation."""
        ids = torch.tensor([prompt])
        return self._generate(ids, torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)[0]

    def _generate(self, ids: Tensor, mask: Tensor, **options: float) -> list[list[int]]:
        # Its configuration has no stop id, so it always generates the full length, as with `ignore_eos`.
        whole = self._native.generate(
            ids.to(self._device), attention_mask=mask.to(self._device), pad_token_id=0, **options
        )
        answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return answers


def _native_config(config: DecoderConfig) -> GlmConfig:
    if config.rope is None:
        raise ValueError("only models that rotate have this class")
    return GlmConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.feed_forward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        attention_bias=config.qkv_bias,
        rms_norm_eps=config.epsilon,
        max_position_embeddings=config.positions,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope.base,
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _native_weights(model: Decoder) -> dict[str, Tensor]:
    """Return the weights by their native names: views, except the norms, which become the model's dtype."""
    places = tensor_names(model, "glm").places
    return {name: each.to(model.dtype) for name, each in places.items() if isinstance(each, Tensor)}
