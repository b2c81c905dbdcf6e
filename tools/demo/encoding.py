"""Turns dialogues into token ids and marks those to learn, with the chat format that serves the model."""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.demo import mixture
from tools.demo.pages import Page
from tools.demo.scene import Line
from triton_models.text.formats import ChatFormat, chat_format
from triton_models.text.tokenizers import load_tokenizer

_JOB = 2_000
"""Dialogues per job of one process; each job has its own seed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One dialogue.

    Attributes:
        ids: uint16 [T].
        learned: bool [T]; True where the model is trained to predict this id from the ones before it.
    """

    ids: NDArray[np.uint16]
    learned: NDArray[np.bool_]


def load_format(directory: Path) -> ChatFormat:
    """Return the chat format over the tokenizer in `directory`."""
    return chat_format("chatglm3", load_tokenizer(directory, "chatglm3"))


def encode(lines: Sequence[Line], directory_format: ChatFormat, stops: tuple[int, int]) -> Sample:
    """Return the ids of a dialogue as the format renders it.

    What the model says is learned, including the id that ends it: the first of `stops` after an answer, the
    second after a tool's call.
    """
    prefix = directory_format.render_turns([], add_generation_prompt=False)
    ids = list(prefix)
    learned = [False] * len(ids)
    for line in lines:
        turn = directory_format.render_turns([line.turn], add_generation_prompt=False)[len(prefix) :]
        if learned[-1]:
            # The id that opens this turn is also the one that ends the answer before it.
            learned += [True] + [False] * (len(turn) - 1)
        else:
            # The role's id is given; what the model says after it is learned.
            learned += [False] + [line.learned] * (len(turn) - 1)
        ids += turn
    if learned[-1]:
        ids.append(stops[1] if lines[-1].turn.metadata else stops[0])
        learned.append(True)
    return Sample(np.array(ids, np.uint16), np.array(learned))


def make_samples(
    directory: Path, seed: int, count: int, longest: int, processes: int, *, changed: Sequence[Page] = ()
) -> list[Sample]:
    """Return at most `count` dialogues; those longer than `longest` tokens are left out.

    If there are `changed` pages, a third of the dialogues are about those.
    """
    jobs = range(-(-count // _JOB))
    with ProcessPoolExecutor(processes) as pool:
        made = pool.map(partial(_make, directory, seed, longest, changed), jobs)
        return [sample for samples in made for sample in samples][:count]


def _make(directory: Path, seed: int, longest: int, changed: Sequence[Page], job: int) -> list[Sample]:
    tokenizer = load_tokenizer(directory, "chatglm3")
    chat = chat_format("chatglm3", tokenizer)
    stops = tokenizer.special_ids["<|user|>"], tokenizer.special_ids["<|observation|>"]
    rng = random.Random(f"{seed}/{job}")
    samples = (encode(mixture.dialogue(rng, changed), chat, stops) for _ in range(_JOB))
    return [sample for sample in samples if len(sample.ids) <= longest]
