"""Masks of many answers in one call."""

import llguidance
import numpy as np
import pytest

from tests.triton_models.text.walks import Walker, Words
from triton_models.text import grammars
from triton_models.text.grammars import GrammarMask
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar


@pytest.fixture(scope="module", params=["chatglm2", "chatglm3", "glm4"])
def walker(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Walker:
    return Walker(tokenizers[request.param], request.param)


@pytest.fixture(params=[False, True], ids=["own thread", "another thread"])
def _thread_that_fills(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = llguidance.LLExecutor(num_threads=1) if request.param else None
    monkeypatch.setattr(grammars, "_thread", lambda: thread)


@pytest.mark.usefixtures("_thread_that_fills")
@pytest.mark.parametrize("kinds", [1, 5], ids=["one grammar", "several"])
def test_masks_filled_and_told_at_once_are_those_done_one_by_one(walker: Walker, kinds: int) -> None:
    size = walker.tokenizer.size
    texts = [f"[a-z]{{{2 + number % kinds}}}[0-9]+" for number in range(40)]
    masks, others = (
        [walker.grammars.compile(Grammar("regex", text)).mask() for text in texts] for _ in range(2)
    )
    for number, (mask, other) in enumerate(zip(masks, others, strict=True)):
        for _ in range(number % 4):
            token = walker.allowed(mask)[0]
            mask.accept(token)
            other.accept(token)
    for _ in range(3):
        words = Words(size, 80)
        assert GrammarMask.fill_all(masks, words, range(0, 80, 2)) == [None] * 40
        tokens = []
        for number, (mask, other) in enumerate(zip(masks, others, strict=True)):
            alone = Words(size)
            other.fill(alone)
            assert np.array_equal(words.array[2 * number], alone.array)
            assert not words.array[2 * number + 1].any()
            tokens.append(next(each for each in walker.allowed(other) if each not in walker.format.stop_ids))
            # What looks ahead is told the same.
            assert mask.takes(tokens[-1:]) == other.takes(tokens[-1:]) == 1
            other.accept(tokens[-1])
        assert GrammarMask.accept_all(masks, tokens) == [None] * 40


@pytest.mark.usefixtures("_thread_that_fills")
def test_of_masks_filled_or_told_at_once_only_the_broken_one_fails(walker: Walker) -> None:
    compiled = walker.grammars.compile(Grammar("regex", "[a-z]{2}[0-9]"))
    masks = [compiled.mask() for _ in range(3)]
    (digit,) = walker.tokenizer.encode("7")[-1:]
    letter = walker.allowed(masks[0])[0]
    first, second, third = GrammarMask.accept_all(masks, [letter, digit, letter])
    assert (first, third) == (None, None)
    assert str(second).startswith("the answer has left its grammar")
    assert compiled.spent
    first, second, third = GrammarMask.fill_all(masks, Words(walker.tokenizer.size, 3), range(3))
    assert (first, third) == (None, None)
    assert str(second).startswith("the answer cannot go on by its grammar")


def test_after_a_failure_among_several_no_grammar_of_theirs_is_used_again(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def consume_token_par(self, told: object) -> list[bool]:
            raise RuntimeError

    compiled = [walker.grammars.compile(Grammar("regex", f"[a-z]{{{number}}}")) for number in (8, 8, 9)]
    masks = [each.mask() for each in compiled]
    monkeypatch.setattr(grammars, "_thread", Failing)
    with pytest.raises(RuntimeError):
        GrammarMask.accept_all(masks, [walker.allowed(mask)[0] for mask in masks])
    assert all(each.spent for each in compiled)
