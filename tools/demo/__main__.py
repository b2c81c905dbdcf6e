"""`python -m tools.demo`: dialogues, tokenizer, training, export, evaluation; on a GPU if there is one.

With `--go-on PAGE,...` the checkpoint that is there, with its tokenizer, is trained a little more: on
dialogues of which a third are about these pages, which have changed, and the others about everything. Another
`--seed` gives other dialogues, to go on again.
"""

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from tools.demo.encoding import make_samples
from tools.demo.evaluation import Responder, evaluate, expected_text, table
from tools.demo.export import CONTEXT, write_config, write_weights
from tools.demo.mixture import cases
from tools.demo.pages import Page, facts, smalltalk
from tools.demo.tokenizer import train_tokenizer
from tools.demo.training import GO_ON, Recipe, train
from tools.demo.values import CHECKPOINT

SEED = 20_240_601
DIALOGUES = 400_000
GO_ON_LONGEST = 448
"""Tokens of a dialogue where training goes on: longer ones are much of the work, and teach nothing new."""
CASES_PER_KIND = 100

log = logging.getLogger("demo")


def main() -> None:
    """Make the checkpoint, then evaluate it with the held-back questions."""
    options = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    options.add_argument("--to", type=Path, default=CHECKPOINT, help="the checkpoint's directory")
    options.add_argument("--only", choices=("make", "evaluate"), help="do one half; default: both")
    options.add_argument("--go-on", type=_pages, default=(), metavar="PAGE,...", help="train it on these")
    options.add_argument("--seed", type=int, default=SEED, help="of the dialogues")
    options.add_argument("--steps", type=int)
    options.add_argument("--dialogues", type=int, default=DIALOGUES)
    options.add_argument("--cases", type=int, default=CASES_PER_KIND, help="cases of each generated kind")
    options.add_argument("--mistakes", type=int, default=20, help="how many wrong answers to show")
    chosen = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if chosen.only != "evaluate":
        _make(chosen.to, chosen.seed, chosen.steps, chosen.dialogues, chosen.go_on)
    if chosen.only != "make":
        _evaluate(chosen.to, chosen.cases, chosen.mistakes)


def _pages(names: str) -> tuple[Page, ...]:
    pages = {page.name: page for page in (*facts(), *smalltalk())}
    return tuple(pages[name] for name in names.split(","))


def _make(directory: Path, seed: int, steps: int | None, dialogues: int, changed: tuple[Page, ...]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_config(directory)
    if not changed:
        train_tokenizer(directory / "tokenizer.model", seed)
    longest = GO_ON_LONGEST if changed else CONTEXT
    samples = make_samples(directory, seed, dialogues, longest, os.cpu_count() or 1, changed=changed)
    log.info("%d dialogues, %d tokens", len(samples), sum(len(sample.ids) for sample in samples))
    recipe = GO_ON if changed else Recipe()
    recipe = replace(recipe, steps=steps or recipe.steps, seed=seed)
    log.info("training on %s: %s", device, recipe)
    write_weights(train(directory, samples, recipe, device, go_on=bool(changed)), directory)


def _evaluate(directory: Path, per_kind: int, mistakes: int) -> None:
    scores, wrong = evaluate(Responder(directory), cases(SEED, per_kind))
    for case, given in wrong[:mistakes]:
        question, expected = case.turns[-1].content, expected_text(case.expected)
        log.info("%s\n  asked    %r\n  expected %r\n  got      %r", case.kind, question, expected, given)
    log.info("%s", table(scores))


if __name__ == "__main__":
    main()
