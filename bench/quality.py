"""Measures what quantised weights change: what a model expects to come next, against itself in 16 bits.

A text is given, and each of its tokens that counts is predicted from all before it. The logits come from the
engine that serves (`triton_models/engine/logits.py`): same kernels, same KV cache, at most 64 rows a step.
`python -m bench.quality`
"""

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from bench.engine import random_model
from bench.gpu.checkpoint import SHAPES
from bench.rows import table
from gateway.commands.load_rows import percentile
from triton_models.checkpoint import load_model
from triton_models.directory import detect_format
from triton_models.embedded.models import BUILT_IN_CHECKPOINT
from triton_models.engine.backend import choose_backend
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.scheduler import LOGITS_ROWS
from triton_models.engine.sequence import Request, TokenOutput
from triton_models.engine.settings import EngineSettings
from triton_models.errors import SettingsError
from triton_models.serving.build import choose_dtype
from triton_models.text.formats import chat_format
from triton_models.text.tokenizers import load_tokenizer

NONE = "none"
"""Stands for weights that are not quantised, in the dtype that the device serves them in."""

REFERENCE = "bfloat16"

TEXTS = ("answers", "documents", "sampled")
"""What a model is given: `answers` (the demo's own), `documents`, or what it has `sampled` itself."""

Load = Callable[[torch.dtype, str | None], CausalModel]
"""Returns the model with weights of this dtype, or quantised so."""

_SEED = 1
_PER_KIND = 20
"""Generated questions of each kind, beside those that the demo's pages hold back."""
_LONGEST = 512
"""Tokens of a piece of a document, and of a text that a model samples."""
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, and the places of those that count: from 1 on, in order."""

    ids: tuple[int, ...]
    counted: tuple[int, ...]

    @property
    def targets(self) -> Tensor:
        """The ids that count, [counted]."""
        return torch.tensor([self.ids[place] for place in self.counted])


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """One kind of weights, over all tokens that count."""

    model: str
    weights: str
    text: str
    """One of `TEXTS`."""
    tokens: int
    kl_mean: float
    """KL(16 bits || these weights) of the distributions at one place, in nats."""
    kl_p99: float
    same_top: float
    """Share of the places where the most likely token is the same."""
    loss: float
    """Mean of minus the log-probability of the text's tokens, in nats."""
    perplexity: float
    """`exp(loss)`."""


def differences(reference: Tensor, other: Tensor, targets: Tensor) -> Tensor:
    """Compare logits at P places.

    Args:
        reference: [P, vocabulary] float32.
        other: as `reference`.
        targets: [P], the tokens of the text there.

    Returns:
        [P, 3] float64, on the host: KL(reference || other) in nats; 1 if the most likely tokens are the same,
        else 0; minus the log-probability that `other` gives the text's token.
    """
    found = []
    parts = (torch.split(each, LOGITS_ROWS) for each in (reference, other, targets))
    for expected, given, tokens in zip(*parts, strict=True):
        p, q = (each.double().log_softmax(dim=-1) for each in (expected, given))
        divergences = (p.exp() * (p - q)).sum(dim=-1)
        same = (expected.argmax(dim=-1) == given.argmax(dim=-1)).double()
        losses = -q.gather(1, tokens[:, None])[:, 0]
        found.append(torch.stack((divergences, same, losses), dim=1).cpu())
    return torch.cat(found)


def measure(
    names: tuple[str, str],
    load: Load,
    read: Callable[[CausalModel], list[Text]],
    quantizations: Sequence[str],
    device: torch.device,
) -> Iterator[QualityRow]:
    """Measure the model in 16 bits, then with each of `quantizations` that the device is made for.

    One model is loaded at a time. The reference's logits at the places that count stay in main memory: 4
    bytes for each token of the vocabulary at each place.

    Args:
        names: of the model, and of the text.
        load: returns the model.
        read: returns the texts, with at least one token that counts; called once, with the reference.
        quantizations: names in `QUANTISATIONS`, or `NONE`.
        device: where the models are.
    """
    model = load(torch.bfloat16, None)
    texts = read(model)
    reference = list(_expectations(model, texts))
    yield _row((*names, REFERENCE), reference, iter(reference), texts, device)
    del model
    for quantization in quantizations:
        chosen = None if quantization == NONE else quantization
        try:
            dtype, _ = choose_dtype("auto", device, chosen)
        except SettingsError as error:
            click.echo(f"left out: {error}", err=True)
            continue
        if chosen is None and dtype == torch.bfloat16:
            continue  # it is the reference
        _empty(device)
        given = _expectations(load(dtype, chosen), texts)
        weights = chosen or str(dtype).removeprefix("torch.")
        yield _row((*names, weights), reference, given, texts, device)


def answers(directory: Path, tokens: int) -> list[Text]:
    """Return held-back questions of the demo with their only right answers, of which `tokens` tokens count.

    Tool calls are among them; the id that ends an answer counts.
    """
    # Only these need the gateway's packages.
    from tools.demo.encoding import encode, load_format  # noqa: PLC0415
    from tools.demo.mixture import cases  # noqa: PLC0415
    from tools.demo.scene import Line  # noqa: PLC0415

    special = load_tokenizer(directory, "chatglm3").special_ids
    form, stops = load_format(directory), (special["<|user|>"], special["<|observation|>"])
    asked = cases(_SEED, _PER_KIND)
    random.Random(_SEED).shuffle(asked)  # noqa: S311 - no secret
    texts = []
    for case in asked:
        sample = encode([*map(Line, case.turns), Line(case.expected, learned=True)], form, stops)
        places = tuple(place for place, counts in enumerate(sample.learned) if counts)[:tokens]
        texts.append(Text(tuple(sample.ids.tolist()), places))
        tokens -= len(places)
        if tokens == 0:
            break
    return texts


def documents(directory: Path, tokens: int) -> list[Text]:
    """Return pieces of this repository's documents, in both languages, of which `tokens` tokens count."""
    name = detect_format(directory)
    tokenizer = load_tokenizer(directory, name)
    prefix = chat_format(name, tokenizer).render_turns([], add_generation_prompt=False)
    texts = []
    for page in sorted((_ROOT / "docs").glob("*.md")):
        ids = tokenizer.encode(page.read_text(encoding="utf-8"))
        for start in range(0, len(ids), _LONGEST):
            piece = ids[start : start + _LONGEST][:tokens]
            places = range(max(1, len(prefix)), len(prefix) + len(piece))
            texts.append(Text((*prefix, *piece), tuple(places)))
            tokens -= len(places)
            if tokens == 0:
                return texts
    return texts


def sampled(model: CausalModel, tokens: int) -> list[Text]:
    """Return texts that the model samples itself, at temperature 1, of which `tokens` tokens count."""
    texts: list[Text] = []
    engine = _engine(model, _LONGEST)
    while tokens > 0:
        count = min(tokens, _LONGEST - 1)
        first = len(texts) % model.vocab_size
        params = SamplingParams(temperature=1.0, seed=len(texts), max_tokens=count)
        outputs = _run(engine, Request(request_id="sampled", prompt_ids=(first,), sampling=params))
        ids = [output.token_id for output in outputs if output.token_id is not None]
        texts.append(Text((first, *ids), tuple(range(1, count + 1))))
        tokens -= count
    return texts


def _expectations(model: CausalModel, texts: Sequence[Text]) -> Iterator[Tensor]:
    """Yield the logits of each text's tokens that count: [counted, vocabulary] float32, on the host."""
    engine = _engine(model, max(len(text.ids) for text in texts))
    for text in texts:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        request = Request(request_id="text", prompt_ids=text.ids[:-1], sampling=params, logits=True)
        told = [each.prompt_logits for each in _run(engine, request) if each.prompt_logits is not None]
        # The logits after one token are about the next.
        yield torch.cat([each.values for each in told])[torch.tensor(text.counted) - 1]


def _engine(model: CausalModel, longest: int) -> Engine:
    size = choose_backend(model.device, model.dtype).block_size
    settings = EngineSettings(
        max_running=1,
        max_batched_tokens=LOGITS_ROWS,
        max_context=longest,
        block_size=size,
        kv_blocks=-(-longest // size),
    )
    return Engine(model, settings)


def _run(engine: Engine, request: Request) -> list[TokenOutput]:
    """Return all that the engine tells a request.

    Raises:
        RuntimeError: it failed.
    """
    engine.add(request)
    outputs = []
    while engine.open_requests:
        engine.step()
        outputs += engine.take_outputs()
    if outputs[-1].error is not None:
        raise RuntimeError(outputs[-1].error)
    return outputs


def _row(
    names: tuple[str, str, str],
    reference: Sequence[Tensor],
    given: Iterator[Tensor],
    texts: Sequence[Text],
    device: torch.device,
) -> QualityRow:
    found = torch.cat(
        [
            differences(*(each.to(device) for each in (expected, other, text.targets)))
            for expected, other, text in zip(reference, given, texts, strict=True)
        ]
    )
    divergence, same, loss = found.mean(dim=0).tolist()
    return QualityRow(
        model=names[0],
        weights=names[2],
        text=names[1],
        tokens=len(found),
        kl_mean=divergence,
        kl_p99=percentile(found[:, 0].tolist(), 99),
        same_top=same,
        loss=loss,
        perplexity=math.exp(loss),
    )


def _empty(device: torch.device) -> None:
    """Give back what the model before held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


quantizations_option = click.option(
    "--quantization",
    "quantizations",
    type=click.Choice([NONE, *QUANTISATIONS]),
    multiple=True,
    default=(NONE, *QUANTISATIONS),
    show_default=True,
    help="repeated: each; none: the weights as the device serves them",
)
"""Of `bench.memory`, too."""


@click.command()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=BUILT_IN_CHECKPOINT,
    help="of ChatGLM2, 3 or GLM-4",
)
@click.option(
    "--random",
    "shape",
    type=click.Choice(list(SHAPES)),
    help="instead, random weights in the shape of ChatGLM3-6B or GLM-4-9B",
)
@click.option(
    "--text",
    type=click.Choice(TEXTS),
    help="the demo's answers to held-back questions, this project's documents, or what the model samples; "
    "default: the first for the demo, the last for random weights, else documents",
)
@quantizations_option
@click.option("--device", help="default: the GPU if there is one")
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True, help="that count")
def main(
    *,
    checkpoint: Path,
    shape: str | None,
    text: str | None,
    quantizations: tuple[str, ...],
    device: str | None,
    tokens: int,
) -> None:
    """Print a table; KL divergences are nats a token, against the same model in bfloat16."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(device)

    def load(dtype: torch.dtype, quantization: str | None) -> CausalModel:
        if shape is not None:
            return random_model(SHAPES[shape], dtype=dtype, device=where, quantization=quantization)
        return load_model(checkpoint, dtype, where, quantization=quantization)

    def read(model: CausalModel) -> list[Text]:
        if text == "sampled":
            return sampled(model, tokens)
        return (answers if text == "answers" else documents)(checkpoint, tokens)

    if text is None:
        demo = checkpoint.samefile(BUILT_IN_CHECKPOINT)
        text = "sampled" if shape is not None else "answers" if demo else "documents"
    names = (checkpoint.name if shape is None else f"random {shape}", text)
    with torch.inference_mode():
        rows = list(measure(names, load, read, quantizations, where))
    click.echo(table(QualityRow, rows))


if __name__ == "__main__":
    main()
