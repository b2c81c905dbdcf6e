"""Checks whether trained weights give the same answers on the GPU as on the CPU: the demo's at temperature 0.

Asks in chats through `tritongate up`. Where two answers differ, the margin shows whether that is to be
expected: it is the difference in log-probability between the CPU's first and second choice at the first token
that differs.
"""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from bench.gpu import servers
from bench.gpu.compare import describe
from bench.rows import table
from triton_models.embedded.models import BUILT_IN_CHECKPOINT

_QUESTIONS = (
    "Who are you?",
    "你好！",
    "你是谁？",
    "What is 12 plus 30?",
    "27 加 15 等于多少？",
    "What is an apple?",
    "What is the capital of France?",
    "What is Triton?",
    "什么是 KV cache？",
    "How do I stream an answer?",
    "怎么开启流式输出？",
    "What does tritongate do?",
    "Thank you!",
    "谢谢你",
    "What is dynamic batching?",
    "什么是动态批处理？",
    "Explain time to first token.",
    "Which metrics are there?",
    "再见",
    "Tell me about the prefix cache.",
)
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token, and the difference in natural log-probability between the two most likely tokens."""

    text: str
    margin: float


@dataclass(frozen=True, slots=True)
class TextRow:
    """Comparison of one server with the reference."""

    server: str
    equal: str
    largest_margin: float
    """The reference's largest margin at tokens where answers begin to differ; 0 if none differs."""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--checkpoint", type=click.Path(exists=True, path_type=Path), default=BUILT_IN_CHECKPOINT)
@click.option("--device", default="cuda:0", show_default=True)
def main(*, folder: Path, checkpoint: Path, device: str) -> None:
    """Ask all questions, print the table, write every answer to FOLDER/texts.json."""
    folder.mkdir(parents=True, exist_ok=True)
    answers: dict[str, list[list[Token]]] = {}
    for where, dtype in (("cpu", "float32"), (device, "float32"), (device, "bfloat16")):
        flags = ["--device", where, "--dtype", dtype]
        log = folder / f"{where}-{dtype}.log"
        with servers.ours(checkpoint, log, flags) as server, ThreadPoolExecutor(_AT_ONCE) as pool:
            answers[f"{where} {dtype}"] = list(pool.map(partial(ask, server.url), _QUESTIONS))
    (reference, wanted), *others = answers.items()
    rows = [compare(name, found, wanted) for name, found in others]
    click.echo(f"{describe()}; against {reference}\n\n{table(TextRow, rows)}")
    texts = {name: ["".join(t.text for t in each) for each in found] for name, found in answers.items()}
    document = json.dumps(texts, indent=1, ensure_ascii=False)
    (folder / "texts.json").write_text(document + "\n", encoding="utf-8")


def ask(url: str, question: str) -> list[Token]:
    """Return the answer to one question."""
    body = {
        "model": "glm",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 96,
        "logprobs": True,
        "top_logprobs": 2,
    }
    request = urllib.request.Request(  # noqa: S310 - our own address
        url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        document = json.load(answer)
    return [
        Token(each["token"], each["top_logprobs"][0]["logprob"] - each["top_logprobs"][1]["logprob"])
        for each in document["choices"][0]["logprobs"]["content"]
    ]


def compare(name: str, found: list[list[Token]], wanted: list[list[Token]]) -> TextRow:
    """Count equal answers, and find the reference's largest margin where other answers begin to differ."""
    margins = [
        margin
        for ours, theirs in zip(found, wanted, strict=True)
        if (margin := parting_margin(ours, theirs)) is not None
    ]
    equal = len(wanted) - len(margins)
    return TextRow(name, f"{equal} of {len(wanted)}", max(margins, default=0.0))


def parting_margin(found: list[Token], wanted: list[Token]) -> float | None:
    """Return the reference's margin at the first token that differs; None if the answers are equal."""
    for ours, theirs in zip(found, wanted, strict=False):
        if ours.text != theirs.text:
            return theirs.margin
    # One ended where the other continued: the token that ends an answer is not listed, so has no margin.
    return None if len(found) == len(wanted) else float("nan")


if __name__ == "__main__":
    main()
