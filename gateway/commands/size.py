"""`tritongate size`: how much of a GPU a checkpoint takes, and how many sequences fit beside it.

Reads only `config.json`: no weights are opened, and nothing of the model side is imported. This is for
planning; the engine itself does not estimate the memory of its steps, it measures it at load time.
"""

import json
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any, Final

import click

GIB: Final = 2**30
ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

# The engine's own figures (tests/gateway/commands/test_size.py compares them).
BLOCK_TOKENS: Final = 64
"""On Hopper; other GPUs have blocks of 16, of which no more sequences fit but by rounding."""
MAX_RUNNING: Final = 512
GPU_SHARE: Final = 0.95
LOGITS_COPIES: Final = 10
GRAPH_BYTES: Final = 2 * 2**20
INT4_GROUP: Final = 128
STEP_TOKENS: Final = 2048
"""Tokens of the largest step."""

GRAPHS: Final = 234
"""Graphs at `MAX_RUNNING`: of each step of decodes one for its logits and three that sample; one of each step
with prompts, and another for many keys of those with few rows (on a Hopper GPU, which has the most)."""
CONTEXT_BYTES: Final = GIB
"""What the driver and its libraries take of a device for one process."""
_FLOAT32: Final = 4
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_CONTEXTS: Final = (1024, 2048, 4096, 8192, 32768, 131072)
_MOST_GIB: Final = 2**20


class SizingError(click.ClickException):
    """The directory cannot be sized; the message is one line for the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a checkpoint that decide how large it is."""

    layers: int
    hidden: int
    ffn: int
    query_heads: int
    kv_heads: int
    head: int
    vocabulary: int
    context: int
    """Its longest context, prompt and answer together, in tokens."""
    bias: bool
    tied: bool = False
    """The output head is the embedding."""
    rotary_share: float = 0.5
    """Of a head's numbers, those that are rotated."""
    stored: str | None = None
    """How the checkpoint has its matrices, as the option `quantization`; None: they are not quantised."""
    stored_head: bool = False
    """Whether it has the output head so, too."""

    def weight_bytes(self, item_bytes: int, *, int4: bool = False) -> int:
        """Return the bytes of the model's weights and buffers, perhaps with its matrices in 4 bits.

        Matrices that are quantised already stay as they are. For classes of transformers' own, these are
        without a few vectors that configurations do not tell.
        """
        qkv = (self.query_heads + 2 * self.kv_heads) * self.head
        layer = (
            (qkv, self.hidden),
            (self.hidden, self.query_heads * self.head),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )
        form = self.stored or ("int4" if int4 else None)
        plain = partial(mul, item_bytes)
        row = plain if form is None else _ROW_BYTES[form]
        head = plain if self.stored and not self.stored_head else row
        others = self.vocabulary * self.hidden + self.layers * self.bias * qkv
        norms = (2 * self.layers + 1) * self.hidden
        rotary = 2 * self.context * (int(self.head * self.rotary_share) // 2)
        return (
            self.layers * sum(rows * row(columns) for rows, columns in layer)
            + (not self.tied) * self.vocabulary * head(self.hidden)
            + others * item_bytes
            + (norms + rotary) * _FLOAT32
        )

    def kv_bytes(self, item_bytes: int) -> int:
        """Return the bytes that the KV cache takes for each token."""
        return 2 * self.layers * self.kv_heads * self.head * item_bytes

    def step_bytes(self, item_bytes: int, max_running: int) -> int:
        """Return roughly what steps take besides weights and KV cache, with everything captured."""
        widest = 2 * self.ffn + 4 * self.hidden
        activations = STEP_TOKENS * widest * item_bytes + max_running * self.vocabulary * _FLOAT32
        sampling = LOGITS_COPIES * max_running * self.vocabulary * _FLOAT32
        counts = max_running * self.vocabulary * _FLOAT32
        # Once for the allocator, once for the graphs' own pool; then what sampling with every option may add.
        pools = 2 * activations + GRAPHS * GRAPH_BYTES
        return CONTEXT_BYTES + counts + pools + max(0, sampling - activations)


def _int4_row(columns: int) -> int:
    """Return the bytes of a matrix's row in 4 bits: with a scale and a zero of 16 bits for each group."""
    return -(-columns // INT4_GROUP) * (INT4_GROUP // 2 + 4)


def _int8_row(columns: int) -> int:
    """Return the bytes of a matrix's row in 8 bits: with a scale of 16 bits."""
    return columns + 2


_ROW_BYTES: Final = {"int4": _int4_row, "int8": _int8_row}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How a GPU's memory is used. In bytes, except for `blocks`."""

    weights: int
    steps: int
    kv_cache: int
    kv_token: int
    blocks: int
    """KV blocks of `BLOCK_TOKENS` tokens each; 0: no memory is left for them."""

    def sequences(self, tokens: int, max_running: int) -> int:
        """Return how many sequences of `tokens` tokens run at once."""
        return min(max_running, self.blocks // -(-tokens // BLOCK_TOKENS))


def read_shape(directory: Path) -> Shape:
    """Read the shape of the checkpoint in `directory`.

    Raises:
        SizingError: no config.json there, or one of another family.
    """
    path = directory / "config.json"
    if not directory.is_dir() and _HUB_NAME.fullmatch(text := str(directory)):
        folder = text.partition("/")[2]
        raise SizingError(
            f"--model {text}: not fetched; download it first: "
            f"hf download {text} --local-dir {folder}, then --model {folder}"
        )
    try:
        document: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise SizingError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise SizingError(f"{path}: not JSON") from error
    if not isinstance(document, dict):
        raise SizingError(f"{path}: not a JSON object")
    try:
        shape = _native(document) if _is_native(document) else _original(document)
        stored, head = _stored(document)
        return replace(shape, stored=stored, stored_head=head)
    except KeyError as error:
        raise SizingError(
            f"{path}: not a checkpoint that can be sized: it has no {error.args[0]!r}, "
            f"and its model_type is {document.get('model_type')!r}"
        ) from error
    except (TypeError, ValueError) as error:
        raise SizingError(f"{path}: not a checkpoint that can be sized: {error}") from error


def _original(document: Mapping[str, Any]) -> Shape:
    heads = _count(document["num_attention_heads"])
    shared = document.get("multi_query_attention") is True
    return Shape(
        layers=_count(document["num_layers"]),
        hidden=_count(document["hidden_size"]),
        ffn=_count(document["ffn_hidden_size"]),
        query_heads=heads,
        kv_heads=_count(document["multi_query_group_num"]) if shared else heads,
        head=_count(document["kv_channels"]),
        vocabulary=_count(document["padded_vocab_size"]),
        context=_count(document["seq_length"]),
        bias=bool(document["add_qkv_bias"]),
    )


def _is_native(document: Mapping[str, Any]) -> bool:
    """Whether it is of transformers' own, in a class whose layers all have a gate, and no experts."""
    gated = "intermediate_size" in document and document.get("hidden_act") in ("silu", "swish")
    return gated and not any("expert" in key or key == "kv_lora_rank" for key in document)


def _native(document: Mapping[str, Any]) -> Shape:
    hidden, heads = _count(document["hidden_size"]), _count(document["num_attention_heads"])
    rope = {**(document.get("rope_parameters") or {}), **(document.get("rope_scaling") or {})}
    share = rope.get("partial_rotary_factor") or document.get("partial_rotary_factor") or 1.0
    return Shape(
        layers=_count(document["num_hidden_layers"]),
        hidden=hidden,
        ffn=_count(document["intermediate_size"]),
        query_heads=heads,
        kv_heads=_count(document.get("num_key_value_heads") or heads),
        head=_count(document.get("head_dim") or hidden // heads),
        vocabulary=_count(document["vocab_size"]),
        context=_context(document, rope),
        bias=document.get("attention_bias") is True,
        tied=document.get("tie_word_embeddings") is True,
        rotary_share=float(share),
    )


def _stored(document: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return how matrices are quantised already, as `Shape.stored`, and whether the output head is, too.

    What is expanded while loading, as fp8 is, counts as not quantised.
    """
    found = document.get("quantization_config") or {"bits": document.get("quantization_bit")}
    if not isinstance(found, dict):
        raise TypeError("quantization_config is no object")
    bits, head = found.get("bits", found.get("w_bit")), found.get("lm_head") is True
    if found.get("quant_method") == "compressed-tensors":
        bits = {"pack-quantized": 4, "int-quantized": 8}.get(str(found.get("format")))
        head = not any("lm_head" in str(name) for name in found.get("ignore") or ())
    return {"4": "int4", "8": "int8"}.get(str(bits)), head


def _context(document: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return how many tokens a sequence may have: scaled, and within the window of attention."""
    context = _count(document["max_position_embeddings"])
    kind, factor = rope.get("type") or rope.get("rope_type"), rope.get("factor") or 1
    if kind == "linear":
        context = int(context * factor)
    elif kind == "yarn":
        context = max(context, int((rope.get("original_max_position_embeddings") or context) * factor))
    window = document.get("sliding_window")
    slides = window is not None and document.get("use_sliding_window", True)
    return min(context, _count(window)) if slides else context


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value


def fit(
    shape: Shape, *, gpu_bytes: int, item_bytes: int, max_running: int = MAX_RUNNING, int4: bool = False
) -> Sizing:
    """Return how a model of `shape` uses `gpu_bytes` of memory."""
    weights, steps = shape.weight_bytes(item_bytes, int4=int4), shape.step_bytes(item_bytes, max_running)
    token = shape.kv_bytes(item_bytes)
    left = int(max(0, gpu_bytes - weights - steps) * GPU_SHARE)
    most = max_running * -(-shape.context // BLOCK_TOKENS)
    blocks = min(most, left // (BLOCK_TOKENS * token))
    return Sizing(
        weights=weights, steps=steps, kv_cache=blocks * BLOCK_TOKENS * token, kv_token=token, blocks=blocks
    )


def advice(shape: Shape, *, gpu_bytes: int, item_bytes: int, max_running: int) -> str:
    """Return with which flags a model fits that does not without: fewer sequences at once, or int4.

    Weights that are quantised already are not quantised again.
    """
    fitted = partial(fit, shape, gpu_bytes=gpu_bytes, item_bytes=item_bytes)

    def most(*, int4: bool) -> int:
        """Return how many sequences can run with a KV block each."""
        return bisect_left(
            range(1, max_running + 1),
            True,  # noqa: FBT003 - of the key
            key=lambda running: fitted(max_running=running, int4=int4).blocks < running,
        )

    plain, small = most(int4=False), most(int4=True)
    smallest = fitted(max_running=small or 1, int4=True)
    if not small:
        taken = (smallest.weights + smallest.steps) / GIB
        return (
            f"Nor does it with `up{'' if shape.stored else ' --quantization int4'} --max-running 1`, "
            f"which takes {taken:.2f} GiB without a KV cache."
        )
    ways = [f"`up --max-running {plain}`"] * bool(plain)
    given = fitted(max_running=max_running)
    if shape.stored is None and (not plain or given.weights > given.steps):
        fewer = f" --max-running {small}" if small < max_running else ""
        weights = smallest.weights / GIB
        ways.append(f"`up --quantization int4{fewer}`, whose weights take {weights:.2f} GiB")
    return f"It does with {', or with '.join(ways)}."


@click.command(short_help="Estimate what fits a GPU.")
@click.option(
    "--model",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="checkpoint directory; its config.json is enough",
)
@click.option(
    "--gpu-memory",
    type=click.FloatRange(0, _MOST_GIB, min_open=True),
    required=True,
    metavar="GIB",
    help="memory of one GPU in GiB, as nvidia-smi shows it",
)
@click.option("--dtype", type=click.Choice(list(ITEM_BYTES)), default="bfloat16", show_default=True)
@click.option("--max-running", type=click.IntRange(1), default=MAX_RUNNING, show_default=True)
def size(directory: Path, gpu_memory: float, dtype: str, max_running: int) -> None:
    """Estimate how much of a GPU a checkpoint takes and how many sequences fit; status 1 if none does."""
    if math.isnan(gpu_memory):
        raise click.BadParameter("nan is no number", param_hint="--gpu-memory")
    shape = read_shape(directory)
    gpu_bytes, item_bytes = int(gpu_memory * GIB), ITEM_BYTES[dtype]
    sizing = fit(shape, gpu_bytes=gpu_bytes, item_bytes=item_bytes, max_running=max_running)
    weights = shape.stored or dtype
    click.echo(f"weights   {sizing.weights / GIB:8.2f} GiB  {weights}")
    click.echo(f"steps     {sizing.steps / GIB:8.2f} GiB  estimated, for {max_running} sequences at once")
    click.echo(
        f"KV cache  {sizing.kv_cache / GIB:8.2f} GiB  {sizing.blocks:,} blocks of {BLOCK_TOKENS} tokens, "
        f"{sizing.kv_token:,} bytes a token"
    )
    if not sizing.blocks:
        click.echo(f"It does not fit a GPU of {gpu_memory:g} GiB in {weights}.")
        click.echo(advice(shape, gpu_bytes=gpu_bytes, item_bytes=item_bytes, max_running=max_running))
        sys.exit(1)
    # The longest is what both the model and the cache allow.
    longest = min(shape.context, sizing.blocks * BLOCK_TOKENS)
    for tokens in (*(tokens for tokens in _CONTEXTS if tokens < longest), longest):
        click.echo(f"{tokens:>9,} tokens each: {sizing.sequences(tokens, max_running):,} sequences at once")
