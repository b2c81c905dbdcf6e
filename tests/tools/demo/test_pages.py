"""What the pages state is so: values come from the code, and whatever they name is there."""

import re
from collections.abc import Iterator
from string import Template
from typing import Any

import click
import pytest
from sentencepiece import SentencePieceProcessor

import gateway.errors
from gateway.cli import main
from gateway.openai.chat_request import ChatRequest
from gateway.settings import Settings, settings_table
from tools.demo.pages import facts, raw, smalltalk
from tools.demo.values import _NATIVE, _OWN, CHECKPOINT, LANGS, ROOT, Lang, _named, fill, routes, values

FILES = ("project", "usage", "concepts", "smalltalk", "unknown")
STATUSES = {
    str(each.status)
    for each in vars(gateway.errors).values()
    if isinstance(each, type) and issubclass(each, gateway.errors.GatewayError) and hasattr(each, "status")
}
MEASURED = {"1.6", "180"}
"""Of an installation, as in docs/getting-started.md."""
NUMBER = r"(?a)(?<![\w.:$-])\d+(?:\.\d+)?(?![\w-]*[A-Za-z-])"
"""Not within a name, such as ChatGLM3-6B, x86-64 or cuda:0."""
LOOPBACK = "127.0.0.1"
ELSEWHERE = {"base_url", "api_key", "get_weather"}
"""Names of OpenAI's SDK and of the tools that clients offer."""
ANSWERED = {"prompt_tokens", "completion_tokens", "finish_reason", "tool_calls"}
"""Fields of answers."""


def written() -> Iterator[tuple[str, str]]:
    """Yield each answer as it is written, with the page that it is on."""

    def texts(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for each in node.values():
                yield from texts(each)
        else:
            yield node

    for file in FILES:
        for name, table in raw(file).items():
            if isinstance(table, dict):
                for form in ("say", "short", "why"):
                    for text in texts(table.get(form, {})):
                        yield f"{file}.{name}.{form}", text


def told() -> str:
    """Return all answers, a line each."""
    forms = [
        form
        for page in (*facts(), *smalltalk())
        for form in (page.answer.say, page.answer.short, page.answer.why or {})
    ]
    return "\n".join(form[lang] for form in forms for lang in LANGS if lang in form)


def test_a_number_in_an_answer_is_a_value_or_was_measured() -> None:
    assert len(list(written())) > 250
    found = {
        (where, number)
        for where, text in written()
        # Not those in names: ChatGLM3-6B, x86-64, cuda:0, /v1, data[0].
        for number in re.findall(NUMBER, text.replace(LOOPBACK, ""))
        if number not in STATUSES | MEASURED and len(number) > 1
    }
    assert found == set()


def test_what_was_measured_is_in_the_documents() -> None:
    text = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    assert {number for number in MEASURED if number not in text} == set()


def test_every_value_is_stated_somewhere() -> None:
    named = {name for _, text in written() for name in Template(text).get_identifiers()}
    assert named == set(values("en")) == set(values("zh"))


def test_a_name_that_is_no_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill({"say": {"en": "on port ${prot}"}})


def test_a_family_of_models_without_a_name_is_an_error() -> None:
    assert _named(["chatglm3", "glm4"], _OWN) == ["ChatGLM3", "GLM-4"]
    assert _named(["qwen2", "qwen3"], _NATIVE) == ["Qwen"]
    with pytest.raises(KeyError):
        _named(["chatglm5"], _OWN)


@pytest.mark.parametrize("lang", LANGS)
def test_values_are_in_their_language(lang: Lang) -> None:
    assert (
        values(lang)["own_models"]
        == {
            "en": "ChatGLM2, ChatGLM3 and GLM-4",
            "zh": "ChatGLM2、ChatGLM3和GLM-4",
        }[lang]
    )
    assert values(lang)["heartbeat_s"] == {"en": "two", "zh": "两"}[lang]


def test_every_path_is_a_route() -> None:
    there = {route.path for route in routes()}
    paths = set(re.findall(r"(?<![A-Za-z0-9.:/])(/[a-z][a-z0-9_/]*)(?![a-z0-9_/-])", told()))
    assert len(paths) > 10
    assert paths - there == set()


def test_every_flag_command_and_target_is_there() -> None:
    assert isinstance(main, click.Group)
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    flags = {flag for each in commands.values() if each for option in each.params for flag in option.opts}
    text = told()
    assert set(re.findall(r"--[a-z][a-z-]+", text)) - flags == set()
    assert set(re.findall(r"tritongate ([a-z]+) (?=--|reads|DIR)", text)) - set(commands) == set()
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(re.findall(r"\bmake ([a-z]+)", text)) - {*targets, "sense"} == set()


def test_every_setting_parameter_and_variable_is_there() -> None:
    text = told()
    known = {*Settings.model_fields, *ChatRequest.model_fields, *ANSWERED, *ELSEWHERE}
    assert set(re.findall(r"(?<![\w./])[a-z]+(?:_[a-z]+)+(?![\w/])", text)) - known == set()
    variables = {row.env for row in settings_table()}
    assert set(re.findall(r"TRITONGATE_[A-Z_]*[A-Z]", text)) - variables == set()


def test_every_file_is_there() -> None:
    named = re.findall(r"[A-Za-z./]+\.md|tools/demo", told())
    assert len(set(named)) >= 5
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_checkpoints_tokenizer_has_pieces_for_every_answer() -> None:
    """What it has not it spells in bytes, which the model would have to learn."""
    pieces = SentencePieceProcessor(model_file=str(CHECKPOINT / "tokenizer.model"))
    letters = sorted(set(told()) - {"\n"})
    assert [each for each in letters if any(map(pieces.is_byte, pieces.encode(each)))] == []
