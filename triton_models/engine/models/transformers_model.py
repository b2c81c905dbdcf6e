"""Any decoder that transformers implements, as one of our models: its own modules around our attention.

transformers lets a function of ours compute the attention of most of its classes. Whether that is all that
such a class needs is found by looking: a forward pass on the meta device shows what each layer passes to that
function (`look`), and one with the weights, that nothing else mixes tokens (`TransformersModel.check`). Knows
nothing of files, blocks or requests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from triton_models.engine.linear import Linear
from triton_models.engine.models import KVShape, Operations
from triton_models.errors import UnsupportedArchitectureError

ATTENTION: Final = "tritongate"
"""Our attention's name in transformers. Classes make no mask for a name that has none registered."""

_LEAST_WIDTH = 16
"""Of a head in the KV cache. Kernels need a power of two of at least this."""

_HARMLESS = frozenset({
    "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "scaling", "sliding_window", "use_cache",
})  # fmt: skip
"""What layers pass that leaves causal attention as it is, or is looked at by itself."""

_ROWS = 6
"""Tokens of a trial."""

_TOLERANCE = 0.05
"""Largest difference, relative to the largest number, of a row that is computed elsewhere in a step."""


@dataclass(slots=True)
class Found:
    """What a model's layers ask of attention, and what its base model returns."""

    layers: int = 0
    query_heads: int = 0
    kv_heads: int = 0
    query_width: int = 0
    """Of a head of queries or keys."""
    value_width: int = 0
    """Of a head of values."""
    window: int | None = None
    """Tokens that a token attends to at most, itself included; None: all before it."""
    output: type[ModelOutput] = ModelOutput

    @property
    def kv_shape(self) -> KVShape:
        """What the KV cache stores: heads as wide as the wider of the two, padded for kernels."""
        widest = max(self.query_width, self.value_width, _LEAST_WIDTH)
        return KVShape(self.layers, self.kv_heads, 1 << (widest - 1).bit_length())


class TransformersModel:
    """A `CausalModel` around a causal LM of transformers, whose base model it takes out.

    Slower than models of our own: each operation of a module is a launch or two, in steps that are not
    captured, its matrices stay as they are, and the last layer is computed for every token.

    Args:
        causal: on its device, made with the attention `ATTENTION`.
        found: by `look`.
        positions: length of the longest sequence.
    """

    def __init__(self, causal: PreTrainedModel, found: Found, *, positions: int) -> None:
        head: Tensor = causal.get_output_embeddings().weight
        self.vocab_size = len(head)
        self.max_positions = positions
        self.kv_shape = found.kv_shape
        self.query_heads = found.query_heads
        self.dtype = head.dtype
        self.device = head.device
        self.leans = False
        self.nbytes = nbytes(causal)
        self._base: Module = causal.base_model
        self._causal = causal
        setattr(causal, causal.base_model_prefix, _Given(found.output))

    def convert(self, convert: Callable[[Linear], Linear]) -> None:
        """Do nothing: the modules multiply by themselves."""

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        """Compute all layers and the final norm."""

        def attend(module: Any, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            width = self.kv_shape.head_dim
            # Attention divides by the root of the width that is stored.
            factor = scaling * math.sqrt(width)
            if not math.isclose(factor, 1.0):
                queries = queries * factor
            heads = torch.cat([_widened(each, width) for each in (queries, keys, values)], dim=1)
            stacked = heads[0].transpose(0, 1).to(self.dtype).contiguous()
            attended = operations.attend(module.layer_idx, stacked, None)
            attended = attended.view(1, len(tokens), -1, width)[..., : values.shape[-1]]
            return attended.to(queries.dtype).contiguous()

        hidden: Tensor = _run(self._base, tokens, operations.positions, attend).last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:  # noqa: ARG002 - it multiplies itself
        """Compute what the class does with its base model's result: the head, scales and caps of logits."""
        logits: Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(self.dtype)

    def check(self) -> None:
        """Hold that nothing but attention mixes tokens: a row must be the same wherever it is in a step.

        Raises:
            UnsupportedArchitectureError: it is not.
        """

        def attend(_: Any, queries: Tensor, keys: Tensor, values: Tensor, __: float) -> Tensor:
            # Of the row alone, but of everything in it.
            shared = queries.shape[1] // keys.shape[1]
            turns = queries.sum(dim=-1) + keys.sum(dim=-1).repeat_interleave(shared, dim=1)
            factors = torch.cos(turns * queries.shape[-1] ** -0.5)
            return _itself(queries, values) * factors.transpose(1, 2)[..., None]

        places = torch.arange(_ROWS, device=self.device)
        first, second = (
            _run(self._base, order + self.vocab_size // 2, order, attend).last_hidden_state[0].float()
            for order in (places, places.flip(0))
        )
        if (first - second.flip(0)).abs().max() > _TOLERANCE * first.abs().max():
            name = type(self._causal).__name__
            raise UnsupportedArchitectureError(
                f"{name}: a token's row depends on others outside of attention, or on its place in a step"
            )


def check_class(causal: type[PreTrainedModel]) -> None:
    """Hold that a class of causal LMs takes `ATTENTION`; some of those that do not cannot be made with it.

    Raises:
        UnsupportedArchitectureError: it does not; the message says why.
    """
    why = None
    if causal._is_stateful:  # noqa: SLF001 - its only name
        why = "it keeps a state of its own (linear attention, Mamba or the like) beside keys and values"
    elif not causal._supports_attention_backend:  # noqa: SLF001 - its only name
        why = "transformers offers no way to give it another attention"
    if why is not None:
        raise UnsupportedArchitectureError(f"{causal.__name__}: {why}")


def look(causal: PreTrainedModel) -> Found:
    """Return what the layers of a causal LM, on any device and with `ATTENTION`, ask of attention.

    Raises:
        UnsupportedArchitectureError: something that ours does not do; the message names it.
    """
    name = type(causal).__name__

    def refuse(what: str) -> NoReturn:
        raise UnsupportedArchitectureError(f"{name}: {what}")

    if causal.base_model is causal or causal.get_output_embeddings() is None:
        refuse("it is no base model with an output head")
    looker = _Looker(refuse)
    tokens = torch.arange(_ROWS, device=causal.device)
    try:
        output = _run(causal.base_model, tokens, tokens, looker.attend, looker.check)
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # noqa: BLE001 - a hundred classes, which may fail in any way
        refuse(f"its forward pass fails with an attention of ours: {error}")
    layers = causal.config.num_hidden_layers
    if len(looker.seen) != layers or {*looker.seen} != {*range(layers)}:
        refuse(f"its {layers} layers attend {len(looker.seen)} times, and each must once")
    looker.found.layers, looker.found.output = layers, type(output)
    return looker.found


def nbytes(model: Module) -> int:
    """Return the bytes of a model's weights and tables, wherever it is."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def attention_of_ours(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tritongate: "_Passed",
    scaling: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend, for transformers: [1, heads, T, width] gives [1, T, heads, width of values].

    `tritongate` is what the forward pass was called with, which transformers' layers hand on.
    """
    if tritongate.check is not None:
        tritongate.check(module, attention_mask, extras)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tritongate.attend(module, query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_of_ours)


_Attend = Callable[[Any, Tensor, Tensor, Tensor, float], Tensor]
_Check = Callable[[Any, Tensor | None, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Passed:
    """What layers hand on to `attention_of_ours`."""

    attend: _Attend
    check: _Check | None


@dataclass(slots=True)
class _Looker:
    """Stands in for attention, and notes what layers ask for."""

    refuse: Callable[[str], NoReturn]
    found: Found = field(default_factory=Found)
    seen: list[int] = field(default_factory=list)
    """Indices of the layers."""

    def check(self, module: Any, mask: Tensor | None, extras: dict[str, Any]) -> None:
        """Refuse what changes attention."""
        if mask is not None:
            self.refuse("it masks attention in a way of its own")
        if extras.get("is_causal") is False or not getattr(module, "is_causal", True):
            self.refuse("its attention is not causal")
        changed = sorted(key for key, value in extras.items() if value is not None and key not in _HARMLESS)
        if changed:
            self.refuse(f"attention with {', '.join(changed)} is not supported")
        if (window := extras.get("sliding_window")) is not None:
            self.found.window = min(window, self.found.window or window)

    def attend(self, module: Any, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        """Note the shapes."""
        shape = (queries.shape[1], keys.shape[1], queries.shape[3], values.shape[3])
        found = self.found
        if self.seen and shape != (found.query_heads, found.kv_heads, found.query_width, found.value_width):
            self.refuse("its layers have heads of different numbers or widths")
        found.query_heads, found.kv_heads, found.query_width, found.value_width = shape
        self.seen.append(module.layer_idx)
        return _itself(queries, values)


class _Given(Module):
    """Stands where a class has its base model, and returns hidden states that were computed already."""

    def __init__(self, output: type[ModelOutput]) -> None:
        super().__init__()
        self._output = output

    @property
    def decoder(self) -> Module:
        """Return itself: OPT's class calls its base model's decoder."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> ModelOutput:
        """Return them in the form of the base model's own output."""
        return self._output(last_hidden_state=inputs_embeds)


def _run(
    base: Module, tokens: Tensor, positions: Tensor, attend: _Attend, check: _Check | None = None
) -> ModelOutput:
    """Run a base model on a step with such an attention; its hidden states are [1, T, width]."""
    output: ModelOutput = base(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        tritongate=_Passed(attend, check),
    )
    return output


def _itself(queries: Tensor, values: Tensor) -> Tensor:
    """Return what comes of tokens that attend to themselves alone."""
    shared = queries.shape[1] // values.shape[1]
    return values.repeat_interleave(shared, dim=1).transpose(1, 2).contiguous()


def _widened(heads: Tensor, width: int) -> Tensor:
    """Return heads of that width; what is added is zero, and changes no product."""
    missing = width - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads
