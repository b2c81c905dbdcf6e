import pytest

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import text_rule
from wire.grammar import Grammar


@pytest.mark.parametrize(
    "text",
    [
        'start: "a ::= b"',
        "start: /x/ // BNF has ::=\n",
        'start: a\na: /::=/ "x"\n// a ::= b\n',
        'start: "a" |\n"b" c ::= ',
    ],
)
def test_a_grammar_of_lark_may_speak_of_bnf(text: str) -> None:
    assert text_rule(Grammar("lark", text)).nested == text


@pytest.mark.parametrize("text", ['root ::= "a"', '# comment\n\n  my-root ::= [^"] "a"\nroot ::= my-root'])
def test_a_rule_of_bnf_makes_a_grammar_gbnf(text: str) -> None:
    nested = text_rule(Grammar("lark", text)).nested
    assert nested is not None
    assert "start:" in nested


@pytest.mark.parametrize("opening", ['"', "/"])
def test_a_literal_that_is_not_closed_is_looked_over_once(opening: str) -> None:
    """Once from each of its characters would take an hour, and nobody else would have the interpreter."""
    text = 'start: "a"\n' + opening + f"\\{opening}" * 2**20
    assert text_rule(Grammar("lark", text)).nested == text


def test_a_literal_that_is_not_closed_ends_with_its_line() -> None:
    with pytest.raises(InvalidGrammarError, match="special"):
        text_rule(Grammar("lark", 'start: "a\n  <|user|>'))
