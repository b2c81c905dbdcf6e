"""Which texts of messages are guarded, and where."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from jinja2.sandbox import SandboxedEnvironment

from gateway.chat.guards import GUARD, Guard, control_tokens, removed_texts, unescaped, unguarded

CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|im_end|>x",
    "<s>",
    "</s>",
    "[INST]",
    "ab",
    "bc",
    "aa",
    "<｜User｜>",
)


def trees(template: str) -> list[Any]:
    return [SandboxedEnvironment().parse(template)]


def controls(template: str, *, special: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> list[str]:
    added = dict.fromkeys(special, True) | dict.fromkeys(others, False)
    return control_tokens(added, trees(template), lambda text: text in template)


def holds_none(text: str, control: tuple[str, ...] = CONTROL) -> bool:
    return not any(token in text for token in control)


@given(some.lists(some.sampled_from([*CONTROL, "<", "|", "a", "b", "c", GUARD]) | some.text(max_size=3)))
def test_no_control_token_is_left_and_the_text_is_the_same(pieces: list[str]) -> None:
    text = "".join(pieces)
    guarded = Guard(CONTROL)(text)
    assert holds_none(guarded)
    assert unguarded(guarded) == text.replace(GUARD, "\ufffd")


@pytest.mark.parametrize("text", ["", "Hi", "<b>", "</script>", "<|", "im_end", "a b", "<think>Hm.</think>"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert Guard(CONTROL)(text) == text
    assert Guard([])(text) == text


def test_tokens_that_overlap_are_both_guarded() -> None:
    assert Guard(CONTROL)("abc") == f"a{GUARD}b{GUARD}c"
    assert Guard(CONTROL)("aaa") == f"a{GUARD}a{GUARD}a"


@pytest.mark.parametrize("control", [(), CONTROL])
def test_a_guard_that_a_user_types_is_none(control: tuple[str, ...]) -> None:
    """Else it would vanish from the prompt."""
    assert Guard(control)(f"a{GUARD}<|im_{GUARD}end|>") == "a\ufffd<|im_\ufffdend|>"


def test_objects_are_guarded_to_their_last_text() -> None:
    value = {"<s>": ["</s>", 1, None, True, {"a": ("[INST]",)}]}
    assert Guard(CONTROL)(value) == {
        f"<{GUARD}s>": [f"<{GUARD}/s>", 1, None, True, {"a": [f"[{GUARD}INST]"]}]
    }


def test_a_thousand_tokens_are_looked_for() -> None:
    control = tuple(f"<SPECIAL_{number}>" for number in range(1000))
    guard = Guard(control)
    for token in control:
        assert guard(f"x{token}") == f"x<{GUARD}{token[1:]}"
    assert guard("<SPECIAL_1000>") == "<SPECIAL_1000>"


@given(some.text(max_size=20))
def test_guards_are_found_again_where_a_text_is_written_in_ascii(text: str) -> None:
    """Those of the text, however many backslashes it has itself."""
    guarded = Guard(CONTROL)(text + "\\ufdd0<s>\\")
    for written in (json.dumps(guarded), repr([guarded])):
        assert unguarded(unescaped(written)) in (json.dumps(unguarded(guarded)), repr([unguarded(guarded)]))


def test_a_list_is_printed_with_its_guards() -> None:
    """As Qwen3-Coder's template prints arguments."""
    assert str(Guard(CONTROL)(["<s>"])) == f"['<{GUARD}s>']"


def test_what_is_special_or_written_by_the_template_is_control() -> None:
    template = "{{ '<｜User｜>' + messages[0].content }}<tool_call></tool_call><arg_key>"
    others = ("<｜User｜>", "<tool_call>", "</tool_call>", "<arg_key>", "<|unused|>", "    ")
    assert controls(template, special=("<s>", "<unk>"), others=others) == ["<s>", "<unk>", "<｜User｜>"]


def test_white_space_and_words_of_the_language_are_no_control_tokens() -> None:
    """As Gemma's and GPT-NeoX's added tokens, which indented templates have everywhere."""
    template = "{% if messages %}\n\n    {{ '\n\n' }}```{{ 'a' }}    {% endif %}<｜User｜>"
    others = ("\n\n", "    ", "if", "```", "<｜User｜>")
    assert controls(template, others=others) == ["<｜User｜>"]


@pytest.mark.parametrize(
    "search",
    [
        "{% if content.endswith('/nothink') %}{% endif %}",
        "{% if '/nothink' in content %}{% endif %}",
        "{% if content.endswith(('/nothink', '/think')) %}{% endif %}",
        "{{ content.split('/nothink')[0] }}",
        "{{ content | replace('/nothink', '') }}",
    ],
)
def test_words_that_a_template_looks_for_are_the_users(search: str) -> None:
    """As in GLM-4.5's, whose users may type it."""
    template = search + "{{ '/nothink' }}"
    assert controls(template, special=("/nothink", "<|user|>")) == ["<|user|>"]
    assert controls("{{ '/nothink' }}", special=("/nothink",)) == ["/nothink"]
    assert controls(search.replace("/nothink", "<|user|>"), special=("<|user|>",)) == ["<|user|>"]


def test_names_of_roles_are_not_the_users() -> None:
    template = "{% if m.role == 'user' or m.role in ['system', 'tool'] %}{{ m.role }}{% endif %}"
    assert controls(template, special=("user", "system")) == ["user", "system"]


def test_reasoning_keeps_its_marks() -> None:
    template = "<think></think>[THINK][/THINK]"
    assert not controls(template, special=("<think>", "</think>", "[THINK]", "[/THINK]"))
    assert not controls(template, others=("<think>", "</think>", "[THINK]", "[/THINK]"))


NEMOTRON = (
    "{{ content.replace('</think>', '<_end_think>').replace('/think', '') | replace('/no_think', '')"
    " | replace(a, b) }}{{ content.split('x') }}"
)


def test_what_a_template_takes_out_of_a_text_makes_no_token_of_the_rest() -> None:
    removed = removed_texts(trees(NEMOTRON))
    assert removed == {"</think>", "/think", "/no_think"}
    guard = Guard(CONTROL, removed)
    for text in ("<|im_/thinkend|>", "</think/think>|im_end|>", "<|im_/no_/thinkthinkend|>", "</thinks>"):
        guarded = guard(f"{text} <s>")
        for order in (sorted(removed), sorted(removed, reverse=True)):
            taken = guarded
            for each in order:
                taken = taken.replace(each, "")
                assert holds_none(taken)
        assert unguarded(guarded) == f"{text} <s>"
    assert guard("a </think> /think <s>") == f"a </think> /think <{GUARD}s>"
