"""The tables in wire/README.md name exactly the keys that the code accepts."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from wire import names
from wire.channel import Frame
from wire.grammar import CallableTool, Grammar, GrammarKind, ToolCalls
from wire.history import Turn
from wire.meta import Meta
from wire.options import OPTIONS
from wire.refusal import RefusalCode
from wire.request import Detokenize, Generation, Tokenize

CONTRACT = (Path(__file__).parents[2] / "wire" / "README.md").read_text(encoding="utf-8")


def table_after(words: str) -> list[str]:
    """Return the first column of the table that follows `words`, without its code marks."""
    rows = CONTRACT.split(words)[1].split("\n\n")[1].splitlines()[2:]
    return [re.match(r"\| `(\w+)` \|", row).group(1) for row in rows]


@pytest.mark.parametrize(
    ("words", "document"),
    [
        ("`wire.request.Generation`", Generation),
        ("`wire.request.Tokenize`", Tokenize),
        ("`wire.request.Detokenize`", Detokenize),
        ("`wire.meta.Meta`", Meta),
        ("`wire.channel.Frame`", Frame),
    ],
)
def test_the_tables_list_every_key(words: str, document: type[msgspec.Struct]) -> None:
    assert sorted(table_after(words)) == sorted(document.__struct_fields__)


def test_the_options_are_listed_with_their_defaults() -> None:
    rows = CONTRACT.split("`wire.options.OPTIONS`")[1].split("\n\n")[1].splitlines()[2:]
    told = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert told == [
        (f"`{option.name}`", option.default_text, option.range_text, option.help) for option in OPTIONS
    ]


def test_nested_documents_are_described_by_their_keys() -> None:
    rows = CONTRACT.split("`wire.meta.Meta`")[1].splitlines()
    for field in msgspec.structs.fields(Meta):
        row = next(line for line in rows if line.startswith(f"| `{field.name}` |"))
        for struct in structs_within(field.type):
            assert all(re.search(rf"\b{key}\b", row) for key in struct.__struct_fields__), field.name
    sentence = CONTRACT.split("`wire.history.Turn`")[1].split("\n\n")[0]
    assert all(f"`{key}`" in sentence for key in Turn.__struct_fields__)


def test_every_kind_of_grammar_is_listed() -> None:
    assert table_after("`wire.grammar.Grammar`") == list(get_args(GrammarKind))
    row = next(line for line in CONTRACT.splitlines() if line.startswith("| `grammar` |"))
    assert all(re.search(rf"\b{key}\b", row) for key in Grammar.__struct_fields__)
    row = next(line for line in CONTRACT.splitlines() if line.startswith("| `tool_calls` |"))
    keys = ToolCalls.__struct_fields__ + CallableTool.__struct_fields__
    assert all(re.search(rf"\b{key}\b", row) for key in keys)


def structs_within(kind: object) -> list[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in getattr(kind, "__args__", ()) for struct in structs_within(part)]


def test_refusal_codes_and_tensors_are_listed() -> None:
    assert all(f"`{code}`" in CONTRACT for code in RefusalCode)
    for name in (names.PROMPT, names.HISTORY, names.SAMPLING):
        assert f"| in `{name}` |" in CONTRACT
    for name in (names.RESPONSE, names.META):
        assert f"| out `{name}` |" in CONTRACT
