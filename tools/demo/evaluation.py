"""Asks a checkpoint the held-back questions, with the same loader, engine and text code that serve it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.demo.mixture import Case
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.text.answer import AnswerStream
from triton_models.text.formats import chat_format
from triton_models.text.tokenizers import load_tokenizer
from wire.history import Turn

_LONGEST_ANSWER = 160
"""In tokens; every right answer is shorter."""


@dataclass(frozen=True, slots=True)
class Score:
    """How many cases of one kind were answered correctly."""

    kind: str
    right: int
    asked: int


class Responder:
    """A checkpoint on the CPU in float32, loaded as by `tritongate up`, that answers in this process."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(directory, "chatglm3")
        self._format = chat_format("chatglm3", self._tokenizer)
        model = load_model(directory, torch.float32, torch.device("cpu"))
        self._engine = Engine(model, EngineSettings(max_running=64, max_waiting=100_000, kv_memory_gib=0.5))

    def answer(self, conversations: Sequence[Sequence[Turn]], *, temperature: float = 0.0) -> list[str]:
        """Return the raw answer to each conversation; a tool call is a name, a newline and the call."""
        streams = []
        for number, turns in enumerate(conversations):
            self._engine.add(
                Request(
                    request_id=str(number),
                    prompt_ids=tuple(self._format.render_turns(turns)),
                    sampling=SamplingParams(
                        temperature=temperature,
                        seed=number,
                        max_tokens=_LONGEST_ANSWER,
                        stop_token_ids=self._format.stop_ids,
                    ),
                )
            )
            streams.append(AnswerStream(self._tokenizer, self._format))
        texts = [""] * len(streams)
        while self._engine.open_requests:
            self._engine.step()
            for output in self._engine.take_outputs():
                number = int(output.request_id)
                if output.token_id is not None and output.token_id not in self._format.stop_ids:
                    texts[number] += streams[number].push(output.token_id).text
                if output.finish_reason is not None:
                    texts[number] += streams[number].finish().text
        return [text.strip() for text in texts]


def expected_text(turn: Turn) -> str:
    """Return what `Responder.answer` returns if the answer is right."""
    # The content is tokenized separately, so its first piece begins with a space.
    return f"{turn.metadata}\n {turn.content}" if turn.metadata else turn.content


def evaluate(responder: Responder, cases: Sequence[Case]) -> tuple[list[Score], list[tuple[Case, str]]]:
    """Return the scores by kind, and each wrong answer with its case; only an exact match is right."""
    answers = responder.answer([case.turns for case in cases])
    wrong = [
        (case, given)
        for case, given in zip(cases, answers, strict=True)
        if given != expected_text(case.expected)
    ]
    asked = Counter(case.kind for case in cases)
    missed = Counter(case.kind for case, _ in wrong)
    return [Score(kind, count - missed[kind], count) for kind, count in asked.items()], wrong


def table(scores: Sequence[Score]) -> str:
    """Return scores as a Markdown table."""
    rows = ["| kind | right | asked | |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {score.kind} | {score.right} | {score.asked} | {score.right / score.asked:.1%} |"
        for score in scores
    ]
    return "\n".join(rows)
