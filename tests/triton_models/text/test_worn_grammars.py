"""Compiled grammars that are handed to no further answer: worn out, or met by a failure."""

from collections import deque
from collections.abc import Callable

import llguidance
import pytest

from tests.triton_models.text.walks import Walker, Words
from triton_models.errors import LibraryPanicError, TokenMaskError
from triton_models.text import grammars
from triton_models.text.grammars import CompiledGrammar
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar


@pytest.fixture(scope="module")
def walkers(tokenizers: dict[str, Tokenizer]) -> dict[str, Walker]:
    return {"chatglm3": Walker(tokenizers["chatglm3"], "chatglm3")}


def test_a_grammar_that_wore_out_is_compiled_anew(
    walkers: dict[str, Walker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its answers share adds up, until none could begin."""
    pattern, few = "[ab]*a[ab]{15}", llguidance.LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    walker = walkers["chatglm3"]
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "LIMITS", few)
        worn = walker.grammars.compile(Grammar("regex", pattern))
        walks = (walker.walk("regex", pattern, seed=seed, steps=60) for seed in range(200))
        with pytest.raises(TokenMaskError, match="too complex"):
            deque(walks, maxlen=0)
        assert worn.spent
        assert walker.walk("regex", pattern, steps=60).ids


def test_a_grammar_is_compiled_anew_before_it_wears_out(
    walkers: dict[str, Walker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "SPENT_AFTER", 100)
    walker, grammar = walkers["chatglm3"], Grammar("regex", "[xy]*")
    first = walker.grammars.compile(grammar)
    walker.walk("regex", grammar.text, steps=40)
    assert walker.grammars.compile(grammar) is first
    mask = first.mask()
    for _ in range(100):
        mask.accept(next(each for each in walker.allowed(mask) if each not in walker.format.stop_ids))
    assert walker.grammars.compile(grammar) is not first
    assert walker.allowed(mask), "an answer under way goes on with the old one"


class Panic(BaseException):
    """As what Python sees of a panic in Rust: no `Exception`."""


def _copy(compiled: CompiledGrammar, _walker: Walker) -> None:
    compiled.mask()


def _fill(compiled: CompiledGrammar, walker: Walker) -> None:
    compiled.mask().fill(Words(walker.tokenizer.size))


def _accept(compiled: CompiledGrammar, _walker: Walker) -> None:
    compiled.mask().accept(0)


@pytest.mark.parametrize(
    ("method", "ask"), [("deep_copy", _copy), ("unsafe_compute_mask_ptr", _fill), ("consume_token", _accept)]
)
def test_a_grammar_that_met_a_panic_is_compiled_anew(
    method: str,
    ask: Callable[[CompiledGrammar, Walker], None],
    walkers: dict[str, Walker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def panic(*_: object) -> None:
        raise Panic

    walker, grammar = walkers["chatglm3"], Grammar("regex", f"{method}[xy]*")
    compiled = walker.grammars.compile(grammar)
    assert walker.grammars.compile(grammar) is compiled
    with monkeypatch.context() as patched:
        patched.setattr(llguidance.LLMatcher, method, panic)
        with pytest.raises((Panic, LibraryPanicError)):
            ask(compiled, walker)
    assert compiled.spent
    assert walker.grammars.compile(grammar) is not compiled
