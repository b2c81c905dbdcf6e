import logging

import llguidance
import pytest

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import (
    FAILED,
    TOO_COMPLEX,
    Document,
    about_grammar,
    about_mask,
    text_rule,
)
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


@pytest.mark.parametrize(
    ("text", "others"),
    [
        (r'root ::= "\U0001F600" [\U00000041-\U00000043]', ["😀A", "😀C"]),
        (
            r'root ::= "\u0041\u00e9\U00002028" [\U00000022\u005d\u005c]',
            ["Aé\u2028]", 'Aé\u2028"', "Aé\u2028\\"],
        ),
        (r'root ::= "\\U0001F600\""', [r"\U0001F600" + '"']),
        (
            'root ::= "a" # one\n # two | three\n  | b\nb ::= # say "\n"c # |" # "\n\n| [|#\\n]# " |',
            ["a", "c # |", "#", "|", "\n"],
        ),
        ('root ::=\n  | "a"\n  | ("b"\n  | "c")\n\n', ["a", "b", "c", ""]),
    ],
)
def test_gbnf_is_read_as_others_read_it(text: str, others: list[str]) -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    for other in others:
        matcher = llguidance.LLMatcher(tokenizer, text_rule(Grammar("lark", text)).nested)
        assert matcher.consume_tokens(tokenizer.tokenize_str(other)), other
        assert matcher.is_accepting(), other


@pytest.mark.parametrize("opening", ['"', "/"])
def test_a_literal_that_is_not_closed_is_looked_over_once(opening: str) -> None:
    """Once from each of its characters would take an hour, and nobody else would have the interpreter."""
    text = 'start: "a"\n' + opening + f"\\{opening}" * 2**20
    assert text_rule(Grammar("lark", text)).nested == text


def test_a_literal_that_is_not_closed_ends_with_its_line() -> None:
    with pytest.raises(InvalidGrammarError, match="special"):
        text_rule(Grammar("lark", 'start: "a\n  <|user|>'))


OURS = Document("start: t0_1\nt0_1: x", None, [])
CLIENTS = Document("start: @answer", "start: nobody", [])
QUOTED = """at 7(8): failed to compile JSON schema: Unknown format: nope
   6 | t0_1: "a"
   7 | body1: %json {"type": "string", "x-guidance": {"lenient": false}}
              ^
   8 | call1: " " "f\\n" body1
"""
PANIC = """panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10
<backtrace>
   0: <unknown>
   1: /home/runner/.cargo/registry/src/parser.rs
"""


def test_an_error_is_told_without_the_document_that_it_quotes() -> None:
    assert about_grammar(QUOTED, OURS) == "failed to compile JSON schema: Unknown format: nope"


def test_lines_of_a_clients_own_grammar_are_counted_as_the_client_does() -> None:
    error = 'at 2(8): unknown name: "nobody"\n   1 | %llguidance {}\n   2 | start: nobody\n              ^\n'
    assert about_grammar(error, CLIENTS) == 'line 1: unknown name: "nobody"'
    translated = text_rule(Grammar("lark", 'root ::= "a" [b-a]')).nested
    assert about_grammar("at 4(8): invalid regex", Document("", translated, [])) == "invalid regex"
    assert about_grammar("unknown grammar @foo", CLIENTS) == "unknown grammar @foo"


@pytest.mark.parametrize("about", [about_grammar, about_mask])
def test_a_panics_own_text_is_for_the_log(about: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(about)
    assert about(PANIC) == FAILED
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().endswith("symbols.len() < u16::MAX as usize - 10")


def test_an_answer_that_cannot_go_on_says_which_way(caplog: pytest.LogCaptureFixture) -> None:
    assert about_mask("") == about_mask("NoExtensionBias\n<non-verbose/>") == "nothing can follow"
    with caplog.at_level(logging.INFO):
        told = about_mask("Parser Error: Current row has 4003 items; max is 2000; consider\n<non-verbose/>")
    assert told == TOO_COMPLEX
    assert "4003 items" in caplog.text
