import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.template_checkpoint import write_tokenizer
from tests.triton_models.native_checkpoint import write_native
from tests.triton_models.serving.conftest import Served, parameters
from triton_models.errors import ModelError, TextError
from triton_models.serving import chat_text as module
from triton_models.serving import service
from triton_models.serving.chat_text import ChatText, archive_of, load_text
from wire.grammar import Grammar
from wire.history import Turn
from wire.refusal import RefusalCode
from wire.request import Detokenize, Generation, Tokenize


def test_a_raw_prompt_is_continued_outside_the_chat_format(served: Served) -> None:
    asked = {"raw": True, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    by_text = served.ask("你好", **asked).wait()
    prompt_ids = by_text.prompt_token_ids
    chat = served.ask("你好", max_tokens=1, return_token_ids=True).wait().prompt_token_ids
    assert prompt_ids[:2] == chat[:2]
    assert prompt_ids[2:] != chat[2:]
    assert len(prompt_ids) < len(chat)
    by_ids = served.ask("", prompt_token_ids=prompt_ids, **asked).wait()
    assert (by_ids.token_ids, by_ids.text) == (by_text.token_ids, by_text.text)
    assert not any(meta.segments for meta in by_text.metas)


@pytest.mark.parametrize(
    ("sampling", "history"),
    [(b'{"raw":true}', b'[{"role":"user","content":"a"}]'), (b'{"raw":true,"role":"system"}', b"")],
)
def test_a_raw_prompt_has_no_turns(served: Served, sampling: bytes, history: bytes) -> None:
    refused = served.send(sampling, "b", history=history).wait()
    assert refused.refusal == (RefusalCode.INVALID_REQUEST, "raw excludes history and role")


@pytest.mark.parametrize(("raw", "shown"), [(True, " The"), (False, "The")])
def test_a_raw_answer_goes_on_from_text(text: ChatText, raw: bool, shown: str) -> None:
    assert text.answer(Generation(raw=raw)).push(text.tokenizer.encode("The")[0]).text == shown


def test_the_answers_first_line_becomes_part_of_the_prompt(served: Served) -> None:
    asked = {"max_tokens": 1, "return_token_ids": True}
    plain, named = (
        served.ask("hi", **asked, **more).wait().prompt_token_ids for more in ({}, {"answer_metadata": "get"})
    )
    assert named[: len(plain)] == plain
    assert len(named) > len(plain)


@pytest.mark.parametrize("sampling", [b'{"raw":true,', b'{"prompt_token_ids":[5],'])
def test_what_is_no_conversation_has_no_first_line(served: Served, sampling: bytes) -> None:
    code, why = served.send(sampling + b'"answer_metadata":""}', "").wait().refused
    assert (code, why[:24]) == (RefusalCode.INVALID_REQUEST, "answer_metadata belongs ")


@pytest.mark.parametrize(("last", "tokens", "reason"), [([], 5, "length"), (["get"], 1, "stop")])
def test_the_answer_ends_after_its_call(
    served: Served, text: ChatText, last: list[str], tokens: int, reason: str
) -> None:
    opens = text.tokenizer.special_ids["<|assistant|>"]
    asked = {"temperature": 0, "max_tokens": 5, "logit_bias": {opens: 100.0}, "answer_metadata": "get"}
    end = served.ask("hi", end_after_call_of=last, **asked).wait().metas[-1]
    assert (end.finish_reason, end.usage.completion_tokens) == (reason, tokens)
    assert end.stop_reason is None


def test_a_conversation_has_the_ids_that_a_generation_has(text: ChatText) -> None:
    turns = [Turn("system", "s", tools=[{"name": "f"}])]
    rendered = text.tokenize(Tokenize(tokenize="conversation"), "你好", turns)
    assert rendered.ids == text.prompt_ids(Generation(), "你好", turns)
    assert rendered.strings is None
    open_end = text.tokenize(Tokenize(tokenize="conversation", add_generation_prompt=False), "你好", turns)
    assert open_end.ids == rendered.ids[:-1]
    result = text.tokenize(Tokenize(tokenize="conversation", role="observation"), "3", turns)
    assert result.ids == text.prompt_ids(Generation(role="observation"), "3", turns)


@pytest.mark.parametrize("first_line", ["", "now"])
def test_an_answer_that_has_started_is_in_its_ids(text: ChatText, first_line: str) -> None:
    ids = text.tokenize(Tokenize(tokenize="conversation", answer_metadata=first_line), "a", []).ids
    assert ids == text.prompt_ids(Generation(answer_metadata=first_line), "a", [])
    if not first_line:
        assert ids == text.prompt_ids(Generation(grammar=Grammar("json_object")), "a", [])
    assert len(ids) > len(text.tokenize(Tokenize(tokenize="conversation"), "a", []).ids)


def test_text_has_the_ids_of_a_raw_prompt_with_its_prefix(text: ChatText) -> None:
    with_prefix, bare = (
        text.tokenize(Tokenize(tokenize="text", prefix=prefix), " a👋", []) for prefix in (True, False)
    )
    assert with_prefix.ids == text.prompt_ids(Generation(raw=True), " a👋", [])
    assert with_prefix.ids[2:] == bare.ids == text.tokenizer.encode(" a👋")
    assert text.detokenize(Detokenize(detokenize=bare.ids), text.tokenizer.size)[0] == text.tokenizer.decode(
        bare.ids
    )
    with pytest.raises(ModelError, match="history"):
        text.tokenize(Tokenize(tokenize="text"), "a", [Turn("user", "b")])


def test_each_id_is_shown_where_that_is_requested(text: ChatText) -> None:
    tokenized = text.tokenize(Tokenize(tokenize="text", prefix=True, strings=True), "a👋", [])
    gmask, sop, *strings = tokenized.strings or []
    assert (gmask, sop) == ("[gMASK]", "sop")
    assert "".join(strings).strip() == "a\\xf0\\x9f\\x91\\x8b"
    _, shown = text.detokenize(Detokenize(detokenize=tokenized.ids, strings=True), text.tokenizer.size)
    assert shown.strings == tokenized.strings
    assert shown.ids is None


def test_ids_that_the_model_does_not_have_are_refused(text: ChatText) -> None:
    size = text.tokenizer.size
    text.detokenize(Detokenize(detokenize=[size - 1]), size)
    with pytest.raises(TextError, match="at place 1: the model has"):
        text.detokenize(Detokenize(detokenize=[0, size]), size)


def test_more_ids_than_any_context_has_are_not_returned(
    text: ChatText, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(text.tokenize(Tokenize(tokenize="text"), "a👋", []).ids)
    monkeypatch.setattr(module, "IDS_LIMIT", count)
    text.tokenize(Tokenize(tokenize="text"), "a👋", [])
    with pytest.raises(TextError, match=f"{count + 2} tokens, and at most {count} are returned"):
        text.tokenize(Tokenize(tokenize="text", prefix=True), "a👋", [])


def test_a_tokenizers_files_come_in_parts(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    archive = archive_of(tmp_path)
    monkeypatch.setattr(served.service, "_text", replace(served.service._text, archive=archive))
    monkeypatch.setattr(service, "FILES_PART", 1000)
    sent = served.send(b'{"tokenizer_files":true}').wait()
    assert len(sent.responses) > 2
    assert b"".join(bytes(part) for part, _ in sent.responses) == archive
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.namelist() == ["tokenizer.json", "tokenizer_config.json"]
        assert files.read("tokenizer.json") == (tmp_path / "tokenizer.json").read_bytes()


def test_the_template_for_tools_is_among_a_tokenizers_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    name = "additional_chat_templates/tool_use.jinja"
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("with tools")
    with zipfile.ZipFile(io.BytesIO(archive_of(tmp_path))) as files:
        assert files.read(name) == b"with tools"
        assert (zipfile.Path(files) / name).is_file()  # as a gateway looks for it


def test_equal_files_make_equal_archives(tmp_path: Path) -> None:
    archives: list[bytes] = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name)
        os.utime(tmp_path / name / "tokenizer.json", (len(archives) * 10**9,) * 2)
        archives.append(archive_of(tmp_path / name))
    assert archives[0] == archives[1]


def test_a_model_that_writes_its_own_conversations_keeps_its_files(served: Served) -> None:
    refused = served.send(b'{"tokenizer_files":true}').wait()
    assert refused.refusal == (
        RefusalCode.INVALID_REQUEST,
        "tokenizer_files: the format 'chatglm3' needs none",
    )


def test_a_templated_checkpoints_files_are_read_with_it(tmp_path: Path) -> None:
    write_native(tmp_path, "qwen2")
    write_tokenizer(tmp_path)
    assert load_text(parameters(tmp_path)).archive == archive_of(tmp_path)
